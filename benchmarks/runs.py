"""Runs: what one process measures, and the JSON files that keep its outcome, so that what was interrupted goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.runner import Outcome, environment, failure, run_apart


@dataclass(frozen=True)
class Run:
    """One contender with its options.

    Args:
        case, contender: as registered in `runner.CONTENDERS`.
        options: everything that changes the numbers, besides the threads.
        same_time_as: a run that this one is given the `seconds` of, as an option of that name.
        piece: options that change no number: how long the process goes on before it leaves a checkpoint, and where.
    """

    case: str
    contender: str
    options: Mapping[str, Any]
    same_time_as: "Run | None" = None
    piece: Mapping[str, Any] = field(default_factory=dict)

    def key(self, threads: int) -> str:
        """Everything that changes the run's numbers."""
        options = {**self.options, "threads": threads}
        return " ".join([self.contender, *(f"{name}={options[name]}" for name in sorted(options))])


@dataclass(frozen=True)
class Measured:
    """A run and what came out of it."""

    run: Run
    outcome: Outcome

    @property
    def is_finished(self) -> bool:
        """False where the process left a checkpoint to go on from."""
        return self.outcome.get("finished", True)


class SavedRuns:
    """Outcomes by key, in memory and on disk, each with its contender, options and environment.

    Args:
        path: a JSON file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Outcome] = json.loads(path.read_text())["runs"] if path.exists() else {}

    def find(self, run: Run, threads: int) -> Measured | None:
        """What is saved of the run, finished or not; None where there is nothing or its rival's time is not known."""
        run = self._paced(run, threads)
        outcome = None if run is None else self.runs.get(run.key(threads))
        return None if run is None or outcome is None else Measured(run, outcome)

    def record(self, run: Run, outcome: Outcome, environment: Mapping[str, Any]) -> Measured:
        """Keeps one run, with its time resolved."""
        told = {"contender": run.contender, "options": dict(run.options), "environment": dict(environment)}
        self.runs[run.key(environment["threads"])] = outcome | told
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"runs": self.runs}, indent=1) + "\n")
        return Measured(run, outcome | told)

    def _paced(self, run: Run, threads: int) -> Run | None:
        if run.same_time_as is None:
            return run
        other = self.find(run.same_time_as, threads)
        if other is None or not other.is_finished:
            return None
        return replace(
            run, options={**run.options, "seconds": max(1, round(other.outcome["seconds"]))}, same_time_as=None
        )

    def execute(self, runs: Sequence[Run], threads: int, console: Console, *, again: bool = False) -> list[Measured]:
        """Does what is not done yet, each in a process of its own, and returns everything that is there and did not fail.

        Args:
            runs: in this order; those that others are given the time of come first.
            threads: of every process.
            console: for the progress bar, and for what failed.
            again: whether finished runs are done again.
        """
        found = []
        with progress_bar(console) as bar:
            task = bar.add_task("", total=len(runs), figures="")
            for planned in runs:
                bar.update(task, description=f"{planned.case}: {planned.contender}")
                known = self.find(planned, threads)
                run = self._paced(planned, threads)
                if run is None:
                    console.print(f"[yellow]{planned.contender}: the run that sets its time is not there.[/yellow]")
                elif known is None or not known.is_finished or again:
                    outcome = run_apart(run.case, run.contender, threads=threads, **run.options, **run.piece)
                    if "error" in outcome:
                        console.print(failure(run.contender, outcome), soft_wrap=True)
                        known = None  # not what was saved before either: callers tell by what is missing
                    else:
                        known = self.record(run, outcome, environment(threads))
                if known is not None:
                    found.append(known)
                bar.advance(task)
        return found


def progress_bar(console: Console) -> Progress:
    """A bar with a count, the time, and room for `figures`; gone when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
    )

"""The suite: cases that are run in presets, kept run by run, and shown as tables and pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.runner import RESULTS
from benchmarks.runs import Measured, Run, SavedRuns
from benchmarks.tables import Table


class Preset(StrEnum):
    """How much is run.

    SMOKE shows that everything runs: seconds a case, no claims, rendered nowhere. QUICK is what `make bench` takes: sizes
    at which the methods differ as they do in the papers, in less than an hour on two cores. PAPER has the papers' sizes:
    days.
    """

    SMOKE = "smoke"
    QUICK = "quick"
    PAPER = "paper"


@dataclass(frozen=True)
class Case:
    """One study.

    Args:
        name: on the command line, and of its file of results.
        about: a line that says what is measured, and whose table it is.
        runs: of a preset, in order; none where the preset leaves the case out.
        tables: of what was measured, in the order of the runs.
        pictures: draws into a folder and returns the files; None where there is nothing to draw.
        note: what the page of results says above the tables.
        shows_tables: on the page of results; not where pictures or docs/measured.md have these figures.
    """

    name: str
    about: str
    runs: Callable[[Preset], list[Run]]
    tables: Callable[[Sequence[Measured]], list[Table]]
    pictures: Callable[[Sequence[Measured], Path], list[Path]] | None = None
    note: str = ""
    shows_tables: bool = True


class NothingToShowError(ValueError):
    """Nothing is saved of what a command is to show, or it is not to be shown."""


#: name -> case, in the order of registration; filled by the cases' modules.
CASES: dict[str, Case] = {}


def register(case: Case) -> None:
    """Adds a case to the suite."""
    CASES[case.name] = case


def saved_runs(case: Case, preset: Preset, folder: Path = RESULTS) -> SavedRuns:
    """What is kept of the case: FOLDER/PRESET/CASE.json."""
    return SavedRuns(folder / preset / f"{case.name}.json")


def measured(case: Case, preset: Preset, folder: Path = RESULTS) -> list[Measured]:
    """The preset's runs that have an outcome; of those with several numbers of threads, the last."""
    saved = saved_runs(case, preset, folder)
    counts = dict.fromkeys(outcome["environment"]["threads"] for outcome in saved.runs.values())
    found = []
    for run in case.runs(preset):
        known = [saved.find(run, threads) for threads in counts]
        found += [measured for measured in known if measured is not None][-1:]
    return found


def nothing_saved(case: Case, preset: Preset, folder: Path = RESULTS) -> str:
    """Says that, what other presets of the case are saved, and what measures this one."""
    others = " and ".join(other for other in Preset if other is not preset and measured(case, other, folder))
    elsewhere = f" (there is {others})" if others else ""
    if not case.runs(preset):
        return f"The preset {preset} leaves {case.name} out{elsewhere}."
    command = measuring(preset, folder, case.name)
    return f"Nothing saved for {case.name} under the preset {preset} in {folder}{elsewhere}; {command} measures it."


def measuring(preset: Preset, folder: Path = RESULTS, *names: str) -> str:
    """The command that fills the folder with the cases of these names, or with all."""
    return f"`{' '.join(['run', *names])} --preset {preset}" + ("`" if folder == RESULTS else f" --results {folder}`")

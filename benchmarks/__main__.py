"""Command line of the benchmarks: the suite. The cases' modules add commands of their own."""

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import cases, page
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, exit_if_missing
from benchmarks.runner import CONTENDERS, RESULTS, run_here
from benchmarks.runs import Measured
from benchmarks.suite import CASES, Case, Preset, measured, nothing_saved, saved_runs
from benchmarks.tables import Table

ChosenPreset = Annotated[Preset, typer.Option(help="smoke (seconds, no claims), quick (an hour), paper (days).")]
ResultsFolder = Annotated[Path, typer.Option("--results", help="Folder of the results, with a folder for each preset.")]
ChosenCases = Annotated[list[str] | None, typer.Argument(metavar="[CASE]...", help="All by default.")]


def _chosen(names: list[str] | None) -> list[Case]:
    if unknown := set(names or ()) - set(CASES):
        raise typer.BadParameter(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}.")
    return [CASES[name] for name in names or CASES]


@app.command(name="list")
def list_cases() -> None:
    """The cases of the suite, and the contenders that further commands compare."""
    rows = [[case.name, case.about, *(str(len(case.runs(preset))) for preset in Preset)] for case in CASES.values()]
    console.print(Table("Cases: runs of each preset", ["case", "", *Preset], rows).for_terminal())
    for case, contenders in CONTENDERS.items():
        console.print(f"[bold]{case}[/bold]: {'; '.join(contenders)}")


@app.command()
def run(
    names: ChosenCases = None,
    preset: ChosenPreset = Preset.SMOKE,
    results: ResultsFolder = RESULTS,
    again: Annotated[bool, typer.Option(help="Do finished runs again.")] = False,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Runs what is not done yet, each in a process of its own, and shows the tables."""
    runs, outcomes = [], []
    for case in _chosen(names):
        planned = case.runs(preset)
        runs += planned
        outcomes += saved_runs(case, preset, results).execute(planned, threads, console, again=again)
        _show(case, measured(case, preset, results))
    exit_if_missing(outcomes, runs)


@app.command()
def table(names: ChosenCases = None, preset: ChosenPreset = Preset.QUICK, results: ResultsFolder = RESULTS) -> None:
    """The tables of what is saved, beside the published figures; status 1 where nothing is."""
    saved = [(case, measured(case, preset, results)) for case in _chosen(names)]
    for case, found in saved:
        if not found:
            typer.echo(nothing_saved(case, preset, results), err=True)
        _show(case, found)
    if not any(found for _, found in saved):
        raise typer.Exit(1)


def _show(case: Case, found: list[Measured]) -> None:
    for shown in case.tables(found) if found else ():
        console.print(shown.for_terminal())


@app.command()
def render(preset: ChosenPreset = Preset.QUICK, results: ResultsFolder = RESULTS) -> None:
    """Writes docs/benchmarks.md and its pictures from what is saved."""
    console.print(f"wrote {page.render(preset, results)}")


@app.command(hidden=True)
def contender(case: str, name: str, options: str, output: Path) -> None:
    """The inside of one contender's process."""
    run_here(case, name, json.loads(options), output)


# Here, not in the package: what processes of one case run needs that case alone.
for _module in pkgutil.iter_modules(cases.__path__, f"{cases.__name__}."):
    importlib.import_module(_module.name)

__all__ = ["app"]

if __name__ == "__main__":
    app()

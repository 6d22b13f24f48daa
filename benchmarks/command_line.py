"""What the commands share: the program they belong to, how contenders are run, shown and saved."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

from benchmarks.datasets import MissingDataError, num_rows
from benchmarks.devices import Device
from benchmarks.runner import Outcome, environment, failure, run_apart, save
from benchmarks.runs import Measured, Run, SavedRuns
from benchmarks.suite import NothingToShowError
from benchmarks.tables import Table


class Commands(TyperGroup):
    """Ends a command that lacks data, or results to show, with the reason alone: there is nothing to trace."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (MissingDataError, NothingToShowError) as error:
            typer.echo(error, err=True)
            raise typer.Exit(1) from error


# Plain tracebacks: their last line, which a contender's process hands on, has the message whole.
app = typer.Typer(
    cls=Commands,
    help="Command line of the benchmarks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Threads = Annotated[int, typer.Option(min=1, help="Threads of every contender.")]
DEFAULT_THREADS = torch.get_num_threads()
FirstRows = Annotated[int | None, typer.Option(min=1, help="First training rows only.")]
#: For runs that leave a checkpoint.
Minutes = Annotated[float, typer.Option(min=0, help="Of each run in this call; another call goes on.")]
DEFAULT_MINUTES = 120.0


def _that_is_there(device: Device) -> Device:
    if device is Device.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here, or this torch was built without CUDA.")
    return device


ChosenDevice = Annotated[Device, typer.Option(help="Where data and models are.", callback=_that_is_there)]


def _that_are_known(given: Any) -> Any:
    """For a name or several."""
    try:
        for name in [given] if isinstance(given, str) else given:
            num_rows(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return given


#: Unknown names, and splits that do not exist, end a command before anything runs.
ChosenData = Annotated[str, typer.Option(help="Data set.", callback=_that_are_known)]
SeveralData = Annotated[list[str], typer.Argument(help="Data sets.", callback=_that_are_known)]
ChosenSplit = Annotated[int, typer.Option(min=0, max=9, help="Of the ten standard ones.")]


def names_of(known: Iterable[str], help: str) -> Any:
    """An option of a command that takes names, such as `--only`, given once for each.

    A name that is not known ends the command before anything runs, and the error lists those that are.
    """
    names = tuple(known)

    def checked(given: list[str] | None) -> list[str] | None:
        unknown = [name for name in given or () if name not in names]
        if unknown:
            raise typer.BadParameter(f"{'; '.join(unknown)}: no such name. There are: {'; '.join(names)}.")
        return given

    return typer.Option(help=help, callback=checked)


def run_contenders(case: str, names: list[str], **options: Any) -> dict[str, Outcome]:
    """Runs contenders one after the other, each in its own process."""
    outcomes = {}
    for name in names:
        with console.status(f"{case}: {name}"):
            outcomes[name] = run_apart(case, name, **options)
        if "error" in outcomes[name]:
            console.print(failure(name, outcomes[name]), soft_wrap=True)
    return outcomes


def succeeded(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Without those that failed."""
    return {name: outcome for name, outcome in outcomes.items() if "error" not in outcome}


def succeeded_or_exit(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Without those that failed; ends the command with status 1 where all did, as `run_contenders` has told."""
    found = succeeded(outcomes)
    if not found:
        raise typer.Exit(1)
    return found


def exit_if_missing(found: Sequence[object], planned: Sequence[object]) -> None:
    """Ends a command that has shown what there is: with status 1 where a run failed."""
    if len(found) < len(planned):
        raise typer.Exit(1)


def run_and_show(
    path: Path, runs: Sequence[Run], threads: int, tables: Callable[[Sequence[Measured]], Sequence[Table]]
) -> None:
    """Does what is not saved in the file yet, and prints all that is there; ends with status 1 where a run failed."""
    found = SavedRuns(path).execute(runs, threads, console)
    for table in tables(found):
        console.print(table.for_terminal())
    exit_if_missing(found, runs)


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table."""
    console.print(Table(title, columns, rows).for_terminal())


def memory_cell(outcome: Outcome) -> str:
    """MB at the peak of the process, and of the device where it used one."""
    process = f"{outcome['peak_memory_mb']:.0f}"
    return (
        process if "peak_device_memory_mb" not in outcome else f"{process} + {outcome['peak_device_memory_mb']:.0f} GPU"
    )


def finish(name: str, options: dict[str, Any], threads: int, *, device: Device = Device.CPU, **content: Any) -> None:
    """Saves benchmarks/results/NAME.json, or NAME_DEVICE.json where that is not the CPU.

    Then ends the command with status 1 where an outcome of the content, at any depth, is of a contender that failed.
    """
    file = name if device is Device.CPU else f"{name}_{device}"
    path = save(file, {"environment": environment(threads, device), "options": options, **content})
    console.print(f"saved {path}")
    if _has_failed(content):
        raise typer.Exit(1)


def _has_failed(content: object) -> bool:
    if not isinstance(content, Mapping):
        return False
    # What a process said last; the errors that benchmarks measure are numbers.
    return isinstance(content.get("error"), str | list) or any(map(_has_failed, content.values()))

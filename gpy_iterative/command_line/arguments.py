"""Arguments of the commands."""

import argparse
from collections.abc import Callable
from pathlib import Path

from gpy_iterative import __version__


def parser(fit: Callable[..., None], predict: Callable[..., None]) -> argparse.ArgumentParser:
    """The parser: `command` is one of the two functions, the rest its arguments."""
    whole = argparse.ArgumentParser(prog="python -m gpy_iterative", description="Gaussian processes on CSV files.")
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    add = _adder(commands, "fit", fit, "learn a column of a CSV file from the others, and test it on held-out rows")
    add("table", type=Path, help="CSV file with a line of column names: numbers, ISO dates, categories")
    add("--target", required=True, metavar="COLUMN", help="the column to predict")
    add("--output", type=Path, metavar="FILE", help="of the model; by default TABLE.gpi.pt")
    add("--drop", nargs="+", default=(), metavar="COLUMN", help="columns to leave out")
    add("--drop-incomplete", action="store_true", help="leave out rows with missing values")
    add("--seed", type=int, default=0, metavar="N", help="for the choice of the held-out tenth (0)")
    add("--max-steps", type=int, metavar="N", help="of the fit, which stops by itself (30)")
    add("--double", action="store_true", help="float64 beyond 20,000 rows, too: slower, for data with little noise")
    add("--checkpoint", type=Path, metavar="FILE", help="written after each step; the same command goes on from it")
    add("--plot", type=Path, metavar="FILE", help="picture of held-out rows and their predictions (.png, .pdf, .svg)")

    add = _adder(commands, "predict", predict, "predict the rows of another CSV file")
    add("model", type=Path, help="what fit has saved")
    add("table", type=Path, help="CSV file with the columns that the model needs")
    add("--output", type=Path, metavar="FILE", help="by default TABLE.predictions.csv")
    return whole


def _adder(commands: argparse._SubParsersAction, name: str, command: Callable[..., None], about: str) -> Callable:
    added = commands.add_parser(name, help=about, description=about)
    added.set_defaults(command=command)
    return added.add_argument

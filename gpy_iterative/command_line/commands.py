import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpy_iterative import __version__
from gpy_iterative.command_line.columns import TrainingData, read_training_data
from gpy_iterative.command_line.model import TableModel
from gpy_iterative.command_line.report import check_plot, fit_lines, save_plot, score_lines
from gpy_iterative.command_line.table import BadInputError, counted_rows, read_table, write_table
from gpy_iterative.errors import (
    CheckpointError,
    ConvergenceWarning,
    DataWarning,
    NonFiniteError,
    NotPositiveDefiniteError,
)
from gpy_iterative.fitting import FitResult
from gpy_iterative.fitting.checkpoint import check_can_save
from gpy_iterative.fitting.fit import fit
from gpy_iterative.mlls import HutchinsonMarginalLogLikelihood
from gpy_iterative.prediction import PathwisePosterior

INTERRUPTED = 130
#: Up to here a start from subsets does not pay.
ROWS_OF_CHEAP_STEPS = 20_000


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command line; None is that of the process.

    Returns the exit code: 2 for bad input, 130 after Ctrl-C. For help, version and unknown options argparse ends the
    process.
    """
    arguments = vars(parser().parse_args(words))
    with warnings.catch_warnings():
        warnings.showwarning = show_note
        try:
            return arguments.pop("command")(**arguments)
        except KeyboardInterrupt:
            print("error: interrupted.", file=sys.stderr)
            return INTERRUPTED
        except BadInputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except OSError as error:  # reading raises BadInputError
            print(f"error: {error.filename or 'a file'} cannot be written: {error.strerror}.", file=sys.stderr)
            return 2


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="python -m gpy_iterative", description="Gaussian processes on CSV files.")
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    add = _adder(
        commands, "fit", fit_table, "learn a column of a CSV file from the others, and test it on held-out rows"
    )
    add("table", type=Path, help="CSV file with a line of column names: numbers, ISO dates, categories")
    add("--target", required=True, metavar="COLUMN", help="the column to predict")
    add("--output", type=Path, metavar="FILE", help="of the model; by default TABLE.gpi.pt")
    add("--drop", nargs="+", default=(), metavar="COLUMN", help="columns to leave out")
    add("--drop-incomplete", action="store_true", help="leave out rows with missing values")
    add("--seed", type=int, default=0, metavar="N", help="for the choice of the held-out tenth (0)")
    add("--max-steps", type=int, metavar="N", help="of the fit, which stops by itself (30)")
    add("--double", action="store_true", help="float64 also where rounding hardly matters: slower")
    add("--checkpoint", type=Path, metavar="FILE", help="written after each step; the same command goes on from it")
    add("--plot", type=Path, metavar="FILE", help="picture of held-out rows and their predictions (.png, .pdf, .svg)")

    add = _adder(commands, "predict", predict_table, "predict the rows of another CSV file")
    add("model", type=Path, help="what fit has saved")
    add("table", type=Path, help="CSV file with the columns that the model needs")
    add("--output", type=Path, metavar="FILE", help="by default TABLE.predictions.csv")
    return whole


def _adder(commands: argparse._SubParsersAction, name: str, command: Callable[..., int], about: str) -> Callable:
    added = commands.add_parser(name, help=about, description=about)
    added.set_defaults(command=command)
    return added.add_argument


def fit_table(
    table: Path,
    target: str,
    output: Path | None,
    drop: Sequence[str],
    drop_incomplete: bool,
    seed: int,
    max_steps: int | None,
    double: bool,
    checkpoint: Path | None,
    plot: Path | None,
) -> int:
    """Fits, tests and saves a model, also after Ctrl-C in the fit. Raises BadInputError."""
    output = output or beside(table, ".gpi.pt")
    check_files([table], [path for path in (output, checkpoint, plot) if path is not None])
    check_can_save(output)  # now, not after a long fit
    if checkpoint is not None:
        check_can_save(checkpoint)
    if plot is not None:
        check_plot(plot)
        check_can_write(plot)
    if seed < 0:
        raise BadInputError(f"--seed must be 0 or more, got {seed}.")
    if max_steps is not None and max_steps < 1:
        raise BadInputError(f"--max-steps must be 1 or more, got {max_steps}.")
    data = read_training_data(table, target, drop, drop_incomplete=drop_incomplete)
    kept, held_out = split(len(data.targets), seed)
    print(*data_lines(data, len(kept)), sep="\n")

    dtype = torch.float64 if double else torch.float32
    model = TableModel.of(data.columns, target, data.inputs[kept], data.targets[kept], dtype)
    mll = HutchinsonMarginalLogLikelihood(model.regression.likelihood, model.regression, generator=0)
    result = fitted(mll, max_steps, checkpoint)
    print(*fit_lines(model, result), sep="\n")

    y, (mean, deviation) = data.targets[held_out], model.predict(mll.posterior(), data.inputs[held_out])
    print(*score_lines(model, y, mean, deviation), sep="\n")
    model.save(output, data.inputs, data.targets)
    print(f"Saved {output}: it predicts from all {len(data.targets)} rows, the held-out ones included.")
    if plot is not None:
        save_plot(plot, target, y, mean, deviation)
        print(f"Saved {plot}.")
    return INTERRUPTED if result.is_interrupted else 0


def show_note(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Replaces advice that names options, or columns of a tensor, which this command does not have."""
    text = str(message)
    if issubclass(category, ConvergenceWarning):
        text = (
            f"{text.partition('. ')[0]}. Scores on held-out rows tell what the model is worth; fit --double may help."
        )
    elif issubclass(category, DataWarning) and "constant input" in text:  # constant columns of the table are left out
        text = (
            "All other values of some inputs are held out, so their lengthscales are not determined: "
            "another --seed holds out other rows."
        )
    print(f"note: {text}", file=sys.stderr)


def split(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the training rows, and of the held-out tenth."""
    shuffled = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    return shuffled[n // 10 :], shuffled[: n // 10]


def data_lines(data: TrainingData, num_kept: int) -> list[str]:
    return [
        f"{num_kept} rows to learn from, {len(data.targets) - num_kept} held out; inputs:",
        *(f"  {column}" for column in data.columns),
        *([f"Constant, and left out: {', '.join(data.constant)}."] if data.constant else []),
        *([f"Incomplete, and left out: {counted_rows(data.num_incomplete)}."] if data.num_incomplete else []),
    ]


def fitted(mll: HutchinsonMarginalLogLikelihood, max_steps: int | None, checkpoint: Path | None) -> FitResult:
    is_large = len(mll.model.train_targets) > ROWS_OF_CHEAP_STEPS
    try:
        return fit(mll, start="subsets" if is_large else "current", max_steps=max_steps, checkpoint=checkpoint)
    except CheckpointError as error:
        raise BadInputError(
            f"{checkpoint} is no checkpoint of a fit with these data, columns and options: give another --checkpoint, or "
            "remove it."
        ) from error
    except (ValueError, NonFiniteError, NotPositiveDefiniteError) as error:
        raise BadInputError(str(error)) from error


def predict_table(model: Path, table: Path, output: Path | None) -> int:
    """Adds mean and standard deviation, empty for incomplete rows. Raises BadInputError."""
    output = output or beside(table, ".predictions.csv")
    check_files([table, model], [output])
    check_can_write(output)
    loaded = TableModel.load(model)
    cells = read_table(table, [column.name for column in loaded.columns])
    added = [f"{loaded.target}_mean", f"{loaded.target}_deviation"]
    if not cells.keys().isdisjoint(added):
        raise BadInputError(f"{table} has a column {' or '.join(added)} already: rename it.")
    x = torch.tensor(np.concatenate([column.encode(cells[column.name]) for column in loaded.columns], axis=1))

    complete = ~x.isnan().any(-1)
    predictions = x.new_full((2, len(x)), torch.nan)
    if complete.any():
        posterior = PathwisePosterior(loaded.regression, loaded.regression.likelihood, generator=0, progress=True)
        predictions[:, complete] = torch.stack(loaded.predict(posterior, x[complete]))
    digits = (min(17, 9 + loaded.mean_digits), 9)
    shown = [
        ["" if number != number else f"{number:.{count}g}" for number in numbers]
        for numbers, count in zip(predictions.tolist(), digits, strict=True)
    ]
    write_table(output, cells | dict(zip(added, shown, strict=True)))
    without = int((~complete).sum())
    gaps = f"; no prediction for {counted_rows(without)} with missing values" if without else ""
    print(f"Saved {output}: {counted_rows(len(x) - without)}{gaps}.")
    return 0


def beside(table: Path, suffix: str) -> Path:
    if table.is_dir():
        raise BadInputError(f"{table} is a folder: give a CSV file.")
    return table.with_suffix(suffix)


def check_files(read: Sequence[Path], written: Sequence[Path]) -> None:
    """Raises BadInputError for files that cannot be written, or would replace another one."""
    others = [path.resolve() for path in read]
    for path in written:
        is_special = path.exists() and not path.is_file()
        if is_special or not path.parent.is_dir():
            raise BadInputError(f"{path} cannot be written: it is no file, or its folder does not exist.")
        if path.resolve() in others:
            raise BadInputError(f"{path} is another file of this command: give another one to write to.")
        others.append(path.resolve())


def check_can_write(path: Path) -> None:
    """Raises OSError where opening the file to write would; leaves it as it is."""
    file = path.resolve()  # of a link stays the link
    is_new = not file.exists()
    path.open("ab").close()
    if is_new:
        file.unlink()

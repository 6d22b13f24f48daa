"""A Gaussian process on a CSV file of your own: trained, tested on rows that it has not seen, saved with its predictions.

    python examples/own_csv.py my.csv --target price
    python examples/own_csv.py my.csv --predict new.csv

Every other column is an input. All columns have to be numbers without gaps: the script says which are not, and what
can be done. A tenth of the rows is held out; their predictions, with error bars, go to `my_predictions.csv`, the
trained model with its units to `my_model.pt`. The second line reads that model again, and writes what it predicts for the
rows of another file to `new_predictions.csv`.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gpytorch
import numpy as np
import pandas as pd
import torch
from torch import Tensor

import gpy_iterative as gpi

#: Up to here float64 is cheap, and a few more steps on all rows cost less than a start from fits to subsets.
ROWS_OF_CHEAP_STEPS = 20_000


class Regression(gpytorch.models.ExactGP):
    """A constant mean, and a Matern-3/2 kernel with a lengthscale for every input."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=x.shape[-1])
        )

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def regression(x: Tensor, y: Tensor) -> Regression:
    """The model and its likelihood, in the dtype of the data."""
    return Regression(x, y, gpytorch.likelihoods.GaussianLikelihood()).to(x)


@dataclass(frozen=True)
class Units:
    """Mean and standard deviation of a column [1] or of several [d]: what the model sees has mean 0 and variance 1."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "Units":
        """Of rows [n, d]; a column that is constant in these keeps its scale."""
        scale = values.std(0, correction=0)
        return cls(values.mean(0), torch.where(scale > 0, scale, 1.0))

    def standardise(self, values: Tensor) -> Tensor:
        """In float64; the model may round it."""
        return (values - self.mean) / self.scale


def written_beside(path: Path) -> tuple[Path, Path]:
    """The files of predictions and of the model that belong to a CSV file."""
    return path.with_name(f"{path.stem}_predictions.csv"), path.with_name(f"{path.stem}_model.pt")


def read_table(path: Path, needed: Sequence[str]) -> pd.DataFrame:
    """The file, with the columns that are needed and at least one row; SystemExit says what is wrong with it."""
    if not path.is_file():
        raise SystemExit(f"There is no file {path}.")
    try:
        table = pd.read_csv(path)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} is no CSV file with a line of column names, in UTF-8: {error}") from error
    unknown = [name for name in needed if name not in table.columns]
    if unknown:
        raise SystemExit(f"No column {', '.join(unknown)} in {path}; its columns are {', '.join(table.columns)}.")
    if table.empty:
        raise SystemExit(f"{path} has no rows below its column names.")
    return table


def numbers(table: pd.DataFrame) -> pd.DataFrame:
    """The table in float64, with NaN for what is not finite; SystemExit names the columns that are text."""
    text = [name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name])]
    if text:
        raise SystemExit(
            f"No numbers: {', '.join(f'{name} ({table[name].iloc[0]!r}, ...)' for name in text)}. Leave these columns out "
            f"(--drop {shlex.join(text)}), or write numbers in their place: pandas.get_dummies for categories, "
            "pandas.to_datetime for dates."
        )
    return table.astype(float).replace([np.inf, -np.inf], np.nan)


def read(path: Path, target: str, dropped: Sequence[str], drop_incomplete: bool) -> tuple[pd.DataFrame, pd.Series]:
    """Inputs [n, d] and targets [n], as numbers.

    Raises:
        SystemExit: with what is wrong with the file, and what can be done about it.
    """
    if target in dropped:
        raise SystemExit(f"{target} is the target: it cannot be left out.")
    table = numbers(read_table(path, (target, *dropped)).drop(columns=list(dropped)))
    gaps = table.isna().sum()
    if gaps.any():
        counts = ", ".join(f"{name} ({count})" for name, count in gaps[gaps > 0].items())
        if not drop_incomplete:
            raise SystemExit(
                f"Missing or infinite values: {counts}, of {len(table)} rows. Fill them in, leave the columns out "
                "(--drop), or leave the rows out (--drop-incomplete)."
            )
        table = table.dropna()
    constant = list(table.columns[table.nunique() == 1])
    if target in constant:
        raise SystemExit(f"{target} is {table[target].iloc[0]:g} in every row: there is nothing to predict.")
    if constant:
        print(f"constant, and left out: {', '.join(constant)}")
        table = table.drop(columns=constant)
    if len(table) < 10 or table.shape[1] < 2:
        raise SystemExit(f"{len(table)} rows and {table.shape[1]} columns are left: too few to learn from.")
    return table.drop(columns=target), table[target]


def train(mll: gpi.mlls.HutchinsonMarginalLogLikelihood, max_steps: int | None) -> gpi.fitting.FitResult:
    """Trains to the optimum; prints how that ended."""
    is_large = len(mll.model.train_targets) > ROWS_OF_CHEAP_STEPS
    if is_large:
        print("many rows: hyperparameters start from fits to small subsets")
    result = gpi.fit(mll, start="subsets" if is_large else "current", max_steps=max_steps)
    value = result.history[-1].value
    print(f"{result.status.name} after {result.steps} steps, log marginal likelihood {value:.4f} a datum")
    print(result.status.advice)
    return result


def print_hyperparameters(result: gpi.fitting.FitResult, inputs: Sequence[str]) -> None:
    """The hyperparameters with their 95 % intervals, lengthscales under the names of their inputs."""
    print("hyperparameters of the standardised columns, with 95 % intervals (a short lengthscale: the input matters)")
    lengthscales = [each for each in result.hyperparameters if "lengthscale" in each.name]
    columns = {each.name: name for each, name in zip(lengthscales, inputs, strict=True)}
    for each in result.hyperparameters:
        print(f"  {columns.get(each.name, each.name)}:{str(each).removeprefix(each.name)}")
    if result.irrelevant:
        print(f"the data may do without the inputs {', '.join(columns[name] for name in result.irrelevant)}")


def predicted(
    posterior: gpi.prediction.PathwisePosterior, x: Tensor, x_units: Units, y_units: Units
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of observations [t] at inputs [t, d], all in the file's units."""
    like_training = posterior.model.train_targets
    with torch.no_grad():
        prediction = posterior.likelihood(posterior(x_units.standardise(x).to(like_training)))
    return prediction.mean * y_units.scale + y_units.mean, prediction.stddev * y_units.scale


def predict(path: Path, new_path: Path) -> None:
    """Reads the model that `main` wrote beside the first file, and writes its predictions for the rows of the second."""
    _, model_path = written_beside(path)
    if not model_path.exists():
        raise SystemExit(f"There is no {model_path}: train first, with {path} and --target.")
    saved = torch.load(model_path, weights_only=True)
    inputs = numbers(read_table(new_path, saved["inputs"])[saved["inputs"]])
    if inputs.isna().to_numpy().any():
        raise SystemExit(
            f"Missing or infinite values in {', '.join(inputs.columns[inputs.isna().any()])}: fill them in."
        )

    model = regression(*saved["train_inputs"], saved["train_targets"])
    model.load_state_dict(saved["model"])
    posterior = gpi.prediction.PathwisePosterior(model, model.likelihood, generator=0)
    x_units, y_units = Units(**saved["x_units"]), Units(**saved["y_units"])
    mean, deviation = predicted(posterior, torch.tensor(inputs.to_numpy()), x_units, y_units)

    target, (predictions_path, _) = saved["target"], written_beside(new_path)
    columns = {f"{target}_predicted": mean.numpy(), f"{target}_deviation": deviation.numpy()}
    inputs.assign(**columns).to_csv(predictions_path)
    print(f"wrote {predictions_path}")


def main(
    path: Path,
    target: str,
    dropped: Sequence[str],
    drop_incomplete: bool,
    steps: int | None,
    double: bool = False,
) -> None:
    """Reads, trains, tests, writes."""
    inputs, targets = read(path, target, dropped, drop_incomplete)
    shuffled = np.random.default_rng(0).permutation(len(targets))
    held_out, kept = np.split(shuffled, [len(targets) // 10])
    x, y = torch.tensor(inputs.to_numpy()), torch.tensor(targets.to_numpy())
    x_units, y_units = Units.of(x[kept]), Units.of(y[kept])
    print(f"{len(kept)} rows to learn from, {len(held_out)} held out, {x.shape[1]} inputs")

    dtype = torch.float64 if double or len(kept) <= ROWS_OF_CHEAP_STEPS else torch.float32
    model = regression(x_units.standardise(x[kept]).to(dtype), y_units.standardise(y[kept]).to(dtype))
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)
    result = train(mll, steps)
    print_hyperparameters(result, inputs.columns)
    mean, deviation = predicted(mll.posterior(), x[held_out], x_units, y_units)

    error = (y[held_out] - mean).abs()
    print(f"root mean square error on held-out rows: {error.square().mean().sqrt():.4g}, in units of {target}")
    print(f"the same if the mean were always predicted: {(y[held_out] - y_units.mean).square().mean().sqrt():.4g}")
    print(
        f"held-out rows within 1.96 standard deviations: {(error < 1.96 * deviation).double().mean():.0%} (95% expected)"
    )

    predictions = inputs.iloc[held_out].assign(
        **{target: targets, f"{target}_predicted": mean.numpy(), f"{target}_deviation": deviation.numpy()}
    )
    predictions_path, model_path = written_beside(path)
    predictions.to_csv(predictions_path)
    state = {"model": model.state_dict(), "train_inputs": model.train_inputs, "train_targets": model.train_targets}
    units = {"x_units": asdict(x_units), "y_units": asdict(y_units), "inputs": list(inputs.columns), "target": target}
    torch.save(state | units, model_path)  # an exact Gaussian process predicts from its data: they belong to it
    print(f"wrote {predictions_path} and {model_path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the CSV file, with a line of column names")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--target", help="the column to predict")
    task.add_argument("--predict", type=Path, metavar="NEW", help="a file whose rows the trained model is to predict")
    parser.add_argument("--drop", nargs="+", default=[], metavar="COLUMN", help="columns to leave out")
    parser.add_argument("--drop-incomplete", action="store_true", help="leave rows with missing values out")
    parser.add_argument("--steps", type=int, help="at the most, at least 1; a fit stops by itself, 30 by default")
    parser.add_argument(
        "--double", action="store_true", help="float64 for many rows, too: slower; for data with little noise"
    )
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps has to be at least 1, got {arguments.steps}.")
    if arguments.predict is not None:
        predict(arguments.path, arguments.predict)
    else:
        main(
            arguments.path,
            arguments.target,
            arguments.drop,
            arguments.drop_incomplete,
            arguments.steps,
            arguments.double,
        )

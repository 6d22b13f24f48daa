import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

from gpy_iterative.command_line.columns import Column
from gpy_iterative.command_line.table import BadInputError
from gpy_iterative.fitting.checkpoint import save_whole
from gpy_iterative.prediction import PathwisePosterior

#: Raise it when older files become unreadable.
FORMAT = 1
CHUNK = 4096


class Regression(gpytorch.models.ExactGP):
    """A constant mean and a Matern-5/2 kernel with a lengthscale per input.

    Lengthscales start at sqrt(d) (Hvarfner, Hellsten and Nardi 2024, "Vanilla Bayesian Optimization Performs Great in
    High Dimensions"): with shorter ones, levels of a category may end uncorrelated.
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=x.shape[-1])
        )
        self.covar_module.base_kernel.lengthscale = x.shape[-1] ** 0.5
        self.to(x)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass(frozen=True)
class Units:
    """Shift and divisor of one column [] or several [d]."""

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "Units":
        """Those of rows [n, d]; constant columns keep their scale."""
        largest = values.abs().amax(0)
        largest = torch.where(largest > 0, largest, 1.0)  # squares neither overflow nor vanish
        parts = values / largest
        scale = parts.std(0, correction=0) * largest
        return cls(parts.mean(0) * largest, torch.where(scale > 0, scale, 1.0))

    def standardise(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.scale


@dataclass(frozen=True)
class TableModel:
    columns: tuple[Column, ...]
    target: str
    input_units: Units  # [d]
    target_units: Units  # []
    regression: Regression

    @classmethod
    def of(cls, columns: Sequence[Column], target: str, x: Tensor, y: Tensor, dtype: torch.dtype) -> "TableModel":
        """The unfitted model, from inputs [n, d] and targets [n] in the table's units."""
        units = Units.of(x), Units.of(y)
        rows = units[0].standardise(x).to(dtype), units[1].standardise(y).to(dtype)
        return cls(tuple(columns), target, *units, Regression(*rows))

    @property
    def inputs(self) -> dict[str, float]:
        names = [name for column in self.columns for name in column.inputs]
        return dict(zip(names, self.input_units.scale.tolist(), strict=True))

    @property
    def mean_digits(self) -> int:
        """Digits of the target that its mean takes, before those that vary."""
        return math.ceil(math.log10(max(1.0, float(self.target_units.mean.abs() / self.target_units.scale))))

    def predict(self, posterior: PathwisePosterior, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of observations [t] at inputs [t, d], in the table's units, float64.

        Raises BadInputError for inputs that overflow.
        """
        rows = self.input_units.standardise(x).to(self.regression.train_targets)
        if rows.isinf().any():
            names, (row, column) = list(self.inputs), rows.isinf().nonzero()[0].tolist()
            raise BadInputError(
                f"{names[column]} is {float(x[row, column]):.3g} in a row, too far from the training data: correct it."
            )
        with torch.no_grad():
            parts = [posterior.likelihood(posterior(part)) for part in rows.split(CHUNK)]
        mean, deviation = (torch.cat([getattr(part, name) for part in parts]).double() for name in ("mean", "stddev"))
        return mean * self.target_units.scale + self.target_units.mean, deviation * self.target_units.scale

    def save(self, path: Path, x: Tensor, y: Tensor) -> None:
        """Writes a model file with these observations [n, d], [n], in the table's units."""
        like = self.regression.train_targets
        data = {
            "inputs": self.input_units.standardise(x).to(like),
            "targets": self.target_units.standardise(y).to(like),
        }
        units = {"input_units": asdict(self.input_units), "target_units": asdict(self.target_units)}
        description = {"format": FORMAT, "columns": [asdict(column) for column in self.columns], "target": self.target}
        save_whole({**description, **units, **data, "state": self.regression.state_dict()}, path)

    @classmethod
    def load(cls, path: Path) -> "TableModel":
        """Raises BadInputError for files that `save` did not write."""
        saved = _load(path)
        regression = Regression(saved["inputs"], saved["targets"])
        regression.load_state_dict(saved["state"])
        columns = tuple(Column(**column) for column in saved["columns"])
        units = Units(**saved["input_units"]), Units(**saved["target_units"])
        return cls(columns, saved["target"], *units, regression)


def _load(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception:  # whatever torch.load raises
        saved = None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT or "target_units" not in saved:
        raise BadInputError(
            f"{path} is no model that the command fit of this version has saved: run fit again. "
            "The model comes first, then the table."
        )
    return saved

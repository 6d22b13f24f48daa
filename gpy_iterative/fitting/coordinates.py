"""Free hyperparameters as one vector of coordinates: logarithms of positive ones, logits of intervals.

Limits of constraints and prior supports are bounds.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import gpytorch
import torch
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Parameter

from gpy_iterative.fitting.prior_support import Range, support_of
from gpy_iterative.worker_threads import CPU

Kind = Literal["log", "logit", "identity"]

#: Distance from bounds, where raw parameters are infinite.
MARGIN = 1e-3


@dataclass(frozen=True)
class Coordinate:
    """The coordinates of one parameter, one per entry.

    Attributes:
        name: as the user sees it, "covar_module.base_kernel.lengthscale".
        kind: "log" for positive values, "logit" for other finite intervals, else "identity".
        support: least and largest value by its priors.
    """

    name: str
    parameter: Parameter
    constraint: Interval | None
    kind: Kind
    support: Range

    @classmethod
    def of(cls, module: gpytorch.Module, name: str, parameter: Parameter, constraint: Interval | None) -> "Coordinate":
        raw = parameter.detach()
        values = raw if constraint is None else constraint.transform(raw)
        support = support_of(module, parameter, values)
        return cls(_shown_name(name), parameter, constraint, _kind(constraint), support)

    @property
    def has_transform(self) -> bool:
        """Whether the raw parameter is not the value itself."""
        return self.constraint is not None and self.constraint.enforced

    def names(self) -> list[str]:
        shape = [size for size in self.parameter.shape if size > 1]
        if not shape:
            return [self.name]
        indices = torch.cartesian_prod(*[torch.arange(size, device=CPU) for size in shape]).reshape(-1, len(shape))
        return [f"{self.name}[{', '.join(map(str, index))}]" for index in indices.tolist()]

    def values(self, raw: Tensor) -> Tensor:
        return raw if self.constraint is None else self.constraint.transform(raw)

    def coordinates(self, values: Tensor) -> Tensor:
        if self.kind == "identity":
            return values
        if self.kind == "log":
            return values.log()
        low, high = self.limits(values)
        return (values - low).log() - (high - values).log()

    def slopes(self) -> Tensor:
        raw = self.parameter.detach().double().requires_grad_()
        return torch.autograd.grad(self.coordinates(self.values(raw)).sum(), raw)[0]

    def user_values(self, coordinates: Tensor) -> Tensor:
        if self.kind == "identity":
            return coordinates
        if self.kind == "log":
            return coordinates.exp()
        low, high = self.limits(coordinates)
        return low + (high - low) * coordinates.sigmoid()

    def bounds(self) -> Range:
        """Least and largest coordinates [entries], float64, possibly infinite."""
        low, high = (self.coordinates(end).reshape(-1) for end in self._domain())
        if self.kind == "logit":
            low, high = low.clamp_min(math.log(MARGIN)), high.clamp_max(-math.log(MARGIN))
        scale = lambda bound: bound.abs().clamp_min(1.0) if self.kind == "identity" else torch.ones_like(bound)
        margin = lambda bound: torch.where(bound.isfinite(), MARGIN * scale(bound).minimum(high - low), 0.0)
        return low + margin(low), high - margin(high)

    def limits(self, like: Tensor) -> tuple[Tensor, Tensor]:
        assert self.constraint is not None
        bounds = (self.constraint.lower_bound, self.constraint.upper_bound)
        return tuple(bound.to(like).expand_as(like) for bound in bounds)

    def _domain(self) -> Range:
        low, high = (end.double() for end in self.support)
        if self.constraint is not None:
            least, most = self.limits(low)
            low, high = low.maximum(least), high.minimum(most)
        if not (low < high).all():
            raise ValueError(
                f"The prior and the constraint of {self.name} have no value in common: change one of them."
            )
        return low, high


def _shown_name(name: str) -> str:
    owner, _, rest = name.partition(".")
    return (rest if owner in ("model", "likelihood") else name).replace("raw_", "")


def _kind(constraint: Interval | None) -> Kind:
    if constraint is None:
        return "identity"
    low, high = float(constraint.lower_bound.min()), float(constraint.upper_bound.max())
    if low >= 0:  # Interval(0, b) too: a logit's curvature vanishes at its ends
        return "log"
    return "logit" if math.isfinite(low) and math.isfinite(high) else "identity"


def free_parameters(module: gpytorch.Module) -> Iterator[tuple[str, Parameter, Interval | None]]:
    for name, parameter, constraint in module.named_parameters_and_constraints():
        if parameter.requires_grad and parameter.numel():
            yield name, parameter, constraint


def network_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {
        f"{path}.{name}": parameter
        for path, part in module.named_modules()
        if not isinstance(part, gpytorch.Module)
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def copied(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def restore(parameters: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, known, strict=True):
        parameter.copy_(value)


class Coordinates:
    """All free hyperparameters of a module as one float64 vector [p].

    Raises:
        ValueError: nothing is free, or a prior and a constraint have no value in common.

    Attributes:
        has_units: [p], whether a coordinate is the value itself.
    """

    def __init__(self, module: gpytorch.Module, *, excluded: Collection[Parameter] = ()) -> None:
        self.parts = [Coordinate.of(module, *found) for found in free_parameters(module) if found[1] not in excluded]
        if not self.parts:
            raise ValueError(
                "There is nothing to fit: no parameter of the model or the likelihood requires a gradient."
            )
        self.names = [name for part in self.parts for name in part.names()]
        bounds = [part.bounds() for part in self.parts]
        self.lower, self.upper = (torch.cat(side).cpu() for side in zip(*bounds, strict=True))
        has_units = [part.kind == "identity" for part in self.parts for _ in part.names()]
        self.has_units = torch.tensor(has_units, device=CPU)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def parameters(self) -> list[Parameter]:
        return [part.parameter for part in self.parts]

    @torch.no_grad()
    def read(self) -> Tensor:
        raws = [part.parameter.double() for part in self.parts]
        found = [part.coordinates(part.values(raw)) for part, raw in zip(self.parts, raws, strict=True)]
        return self._joined(found)

    @torch.no_grad()
    def write(self, coordinates: Tensor) -> None:
        for part, values in zip(self.parts, self.user_values(coordinates), strict=True):
            raw = values if part.constraint is None else part.constraint.inverse_transform(values)
            part.parameter.copy_(raw)

    def enter_bounds(self) -> None:
        position = self.read()
        inside = position.clamp(self.lower, self.upper)
        if not torch.equal(position, inside):
            self.write(inside)

    def at_bounds(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return position <= self.lower + MARGIN, position >= self.upper - MARGIN

    def user_values(self, coordinates: Tensor) -> list[Tensor]:
        return [part.user_values(entries) for part, entries in zip(self.parts, self._split(coordinates), strict=True)]

    def user_entries(self, coordinates: Tensor) -> list[float]:
        return self._joined(self.user_values(coordinates)).tolist()

    def slopes(self) -> Tensor:
        return self._joined([part.slopes() for part in self.parts])

    def check_value(self, value: Tensor) -> None:
        """ValueError if it depends on no free parameter."""
        if not value.requires_grad:
            raise ValueError(
                f"There is nothing to fit: the value depends on no parameter that requires a gradient ({self.names[0]} has "
                "no part in it)."
            )

    def gradient(self, function: Tensor, *, retain_graph: bool = False) -> Tensor:
        self.check_value(function)
        found = torch.autograd.grad(
            function, self.parameters, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
        return self._joined(found) / self.slopes()

    def hessian(self, function: Tensor) -> Tensor:
        if not function.requires_grad:
            return torch.zeros(len(self), len(self), dtype=torch.float64, device=CPU)
        options = {"allow_unused": True, "materialize_grads": True}
        raws = self.parameters
        transformed = [part.coordinates(part.values(part.parameter)).sum() for part in self.parts]
        slopes = torch.autograd.grad(transformed, raws, create_graph=True)
        gradients = torch.autograd.grad(function, raws, create_graph=True, **options)
        entries = torch.cat([(g / slope).reshape(-1) for g, slope in zip(gradients, slopes, strict=True)])
        rows = [
            self._joined(torch.autograd.grad(entry, raws, retain_graph=True, **options))
            if entry.requires_grad
            else torch.zeros(len(self), dtype=torch.float64, device=CPU)
            for entry in entries
        ]
        hessian = torch.stack(rows) / self.slopes()
        return (hessian + hessian.mT) / 2

    def directions(self) -> Iterator[tuple[int, Tensor]]:
        """For each coordinate: number and derivative of its parameter."""
        for number, (part, slopes) in enumerate(zip(self.parts, self._split(self.slopes()), strict=True)):
            flat = slopes.reshape(-1)
            for entry in range(len(flat)):
                direction = torch.zeros_like(flat)
                direction[entry] = 1 / flat[entry]
                yield number, direction.reshape(slopes.shape).to(part.parameter)

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().double().reshape(-1).cpu() for tensor in tensors])

    def _split(self, vector: Tensor) -> list[Tensor]:
        sizes = [part.parameter.numel() for part in self.parts]
        parts = zip(self.parts, vector.split(sizes), strict=True)
        return [entries.reshape(part.parameter.shape).to(part.parameter.device) for part, entries in parts]

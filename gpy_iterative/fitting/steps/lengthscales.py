"""Where to look for a gain that lengthscales hide. There, gradient and curvature of their logarithms vanish."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.fitting.coordinates import Coordinate, Coordinates
from gpy_iterative.fitting.result import irrelevant_inputs
from gpy_iterative.fitting.steps.points import Assessment, Point
from gpy_iterative.fitting.stopping import LEFT
from gpy_iterative.worker_threads import CPU

#: Outputscale of a kernel that has had no effect, relative to the noise: the value rises with it if there is anything to
#: explain, and a larger one would have to explain more.
FIRST_PART = 0.1
#: Standard errors of a gradient that is worth an evaluation, which then decides.
NOTICED = 2.0


def shorter(coordinates: Coordinates, point: Point, found: Assessment) -> Tensor | None:
    """Position [p] with large lengthscales shortened, where the gradient sees a gain; None if nowhere.

    Far out, gradient and information of the logarithm t = log l fall as l^-2 and l^-4, and the ridge hides their gain
    g^2 / 2A. In l^-2 the value is nearly quadratic: Newton's step, until the standard error of t is one.
    """
    gradient, information = found.gradient, found.curvature.matrix.diagonal()
    is_far = _are_in(irrelevant_inputs(coordinates, found.curvature.matrix), coordinates)
    noise = found.samples.square().mean(0).sqrt() if len(found.samples) else torch.zeros_like(gradient)
    is_seen = (-gradient > NOTICED * noise) & (gradient.square() > 2 * LEFT * information) & (information > 0)
    is_noticed = is_far & is_seen & ~found.held
    if not is_noticed.any():
        return None
    shorter = -0.5 * torch.log1p(-2 * gradient / information).minimum(-0.5 * information.log())
    return point.position + torch.where(is_noticed, shorter, 0.0)


def typical(mll: Any, coordinates: Coordinates, point: Point, found: Assessment, *, is_start: bool) -> Tensor | None:
    """Position [p] with lengthscales of the inputs' spread where they have no effect; None if all have one.

    No gradient leads away from a kernel that is constant, diagonal or far below the noise; it also gets a visible
    outputscale. At the start, single inputs without effect are included: some explain something only together. Later,
    steps have judged them.
    """
    irrelevant = irrelevant_inputs(coordinates, found.curvature.matrix)
    kernels = [part for part in coordinates.parts if "lengthscale" in part.name]
    useless = [part.name for part in kernels if {*part.names()} <= {*irrelevant}]
    useful = [part.name for part in kernels if part.name not in useless]
    chosen, values = list(irrelevant), []
    for part in coordinates.parts:
        value = torch.full(part.parameter.shape, torch.nan, dtype=torch.float64, device=CPU)
        if part.name in useless or (is_start and part.name in useful):
            value = _typical_lengthscale(part, mll).expand_as(value)
        elif _is_outputscale(part, useless) and not _is_outputscale(part, useful):
            value = value.fill_(FIRST_PART * _noise(point))
            chosen += part.names()
        values.append(value.reshape(-1))
    logs = torch.cat(values).log()
    is_reset = _are_in(chosen, coordinates) & logs.isfinite()
    return torch.where(is_reset, logs, point.position) if is_reset.any() else None


def _typical_lengthscale(part: Coordinate, mll: Any) -> Tensor:
    """Standard deviations [d] of a kernel's inputs times d^1/2, or their norm [1]; NaN if unknown."""
    columns = torch.cat([inputs.detach().double().flatten(0, -2) for inputs in mll.model.train_inputs], dim=-1)
    kernel = next(module for module in mll.modules() if part.parameter in {*module.parameters(recurse=False)})
    dims, size = getattr(kernel, "active_dims", None), part.parameter.shape[-1]
    columns = columns if dims is None else columns[:, dims]
    spread = (columns - columns.mean(0)).square().mean(0).sqrt().cpu()
    if size == 1:
        return spread.norm().reshape(1)
    return size**0.5 * spread[:size] if size <= len(spread) else torch.full((size,), torch.nan, device=CPU)


def _is_outputscale(part: Coordinate, kernels: Sequence[str]) -> bool:
    """Whether it is the scale of any of these kernels, given by the names of their lengthscales."""
    owner, _, name = part.name.rpartition(".")
    return name == "outputscale" and part.kind == "log" and any(kernel.startswith(f"{owner}.") for kernel in kernels)


@torch.no_grad()
def _noise(point: Point) -> float:
    """r^T a / a^T a with a = H^-1 r for the residual r: the noise variance, as a is mostly noise."""
    assert point.evaluation is not None
    residual, weights = point.evaluation.system.residual.double(), point.evaluation.estimate.weights.double()
    return float((residual * weights).sum() / weights.square().sum())


def _are_in(names: Sequence[str], coordinates: Coordinates) -> Tensor:
    return torch.tensor([name in names for name in coordinates.names], device=CPU)

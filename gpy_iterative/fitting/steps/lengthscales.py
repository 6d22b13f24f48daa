"""Where to look for a gain that lengthscales hide. There, gradient and curvature of their logarithms vanish."""

from collections.abc import Collection

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.fitting.coordinates import Coordinate, Coordinates
from gpy_iterative.fitting.result import irrelevant_inputs
from gpy_iterative.fitting.steps.points import Assessment, Point
from gpy_iterative.fitting.stopping import LEFT
from gpy_iterative.linear_operators.extensions import all_parts, sum_terms
from gpy_iterative.linear_operators.noisy import kernel_and_noise
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.worker_threads import CPU

#: Outputscale of a kernel that has had no effect, relative to the noise: the value rises with it if there is anything to
#: explain, and a larger one would have to explain more.
FIRST_PART = 0.1
#: Standard errors of a gradient that is worth an evaluation, which then decides.
NOTICED = 2.0
#: Of a logarithm. Less comes from entries next to zero: an outlier is alone already, at any shorter lengthscale, too.
LEAST_INFORMATION = 1e-40


def shorter(coordinates: Coordinates, point: Point, found: Assessment) -> Tensor | None:
    """Position [p] with large lengthscales shortened, where the gradient sees a gain; None if nowhere.

    Far out, gradient and information of the logarithm t = log l fall as l^-2 and l^-4, and the ridge hides their gain
    g^2 / 2A. In l^-2 the value is nearly quadratic: Newton's step, until the standard error of t is one.
    """
    gradient, information = found.gradient, found.curvature.matrix.diagonal()
    is_far = _are_in(irrelevant_inputs(coordinates, found.curvature.matrix), coordinates)
    noise = found.samples.square().mean(0).sqrt() if len(found.samples) else torch.zeros_like(gradient)
    is_seen = (
        (-gradient > NOTICED * noise) & (gradient.square() > 2 * LEFT * information) & (information > LEAST_INFORMATION)
    )
    is_noticed = is_far & is_seen & ~found.held
    if not is_noticed.any():
        return None
    change = -0.5 * torch.log1p(-2 * gradient / information).minimum(-0.5 * information.log())
    return point.position + torch.where(is_noticed, change, 0.0)


def typical(coordinates: Coordinates, point: Point, found: Assessment, *, is_start: bool) -> Tensor | None:
    """Position [p] with lengthscales of the inputs' spread where they have no effect; None if all have one.

    No gradient leads away from a kernel that is constant, diagonal or far below the noise; it also gets a visible
    outputscale. At the start, single inputs without effect are included: some explain something only together. Later,
    steps have judged them. It serves models with one stationary kernel, whose inputs the system knows.
    """
    assert point.evaluation is not None
    operator = point.evaluation.system.operator
    kernel, lengthscale = _stationary_kernel(operator), _only_positive(coordinates, "lengthscale")
    if kernel is None or lengthscale is None:
        return None
    names, inputs = lengthscale.names(), kernel.kernel_inputs().detach()
    irrelevant = {*names}.intersection(irrelevant_inputs(coordinates, found.curvature.matrix))
    has_no_effect = len(irrelevant) == len(names)
    if not irrelevant or not (is_start or has_no_effect) or len(names) not in (1, inputs.shape[-1]):
        return None
    spread = (inputs.double() - inputs.double().mean(0)).square().mean(0).sqrt().cpu()  # in lengthscales
    spread = spread.norm() if len(names) == 1 else len(names) ** 0.5 * spread
    reached, is_reset = point.position.clone(), _are_in(irrelevant, coordinates)
    reached[_are_in(names, coordinates)] += spread.log()
    outputscale = _only_positive(coordinates, "outputscale")
    is_single_term = sum(1 for _ in sum_terms(kernel_and_noise(operator)[0])) == 1
    if has_no_effect and is_single_term and outputscale is not None and outputscale.parameter.numel() == 1:
        is_scale = _are_in(outputscale.names(), coordinates)
        reached[is_scale] = (FIRST_PART * _noise(point)).log()
        is_reset |= is_scale
    is_reset &= reached.isfinite()
    return torch.where(is_reset, reached, point.position) if is_reset.any() else None


def _stationary_kernel(operator: LinearOperator) -> RadialKernelLinearOperator | None:
    """The only one of an unbatched operator, if its inputs are not angles of a period."""
    found = [part for part in all_parts(operator) if isinstance(part, RadialKernelLinearOperator)]
    return found[0] if len(found) == 1 and not found[0].angles and not operator.batch_shape else None


def _only_positive(coordinates: Coordinates, name: str) -> Coordinate | None:
    """The positive parameter of this name, if there is just one."""
    found = [part for part in coordinates.parts if part.name.endswith(name) and part.kind == "log"]
    return found[0] if len(found) == 1 else None


@torch.no_grad()
def _noise(point: Point) -> Tensor:
    """r^T a / a^T a with a = H^-1 r for the residual r: the noise variance, as a is mostly noise."""
    assert point.evaluation is not None
    residual, weights = point.evaluation.system.residual.double(), point.evaluation.estimate.weights.double()
    return ((residual * weights).sum() / weights.square().sum()).cpu()


def _are_in(names: Collection[str], coordinates: Coordinates) -> Tensor:
    return torch.tensor([name in names for name in coordinates.names], device=CPU)

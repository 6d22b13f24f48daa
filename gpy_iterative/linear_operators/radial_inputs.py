"""GPyTorch kernels as radial functions of scaled inputs.

The periodic kernel exp(-2 sum_d sin^2(pi (x_d - x'_d) / p_d) / l_d) is exp(-|u - u'|^2 / 2) for points on circles,
u_d = (cos a_d, sin a_d) / sqrt(l_d) with a_d = 2 pi x_d / p_d. A product of such and RBF kernels is the same function of
all their coordinates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from gpytorch import kernels
from torch import Tensor

from gpy_iterative.linear_operators.radial.functions import MATERN, RATIONAL_QUADRATIC, RBF, RadialFunction
from gpy_iterative.linear_operators.radial.grid import Axis, axes_of, own_cells, repeated_inputs

Inputs = TypeVar("Inputs", Tensor, Tensor | None)
#: A kernel and its inputs x1 and x2.
_Factor = tuple[kernels.Kernel, Tensor, Tensor | None]

#: Inputs whose median is the origin of a radial kernel.
CENTRE_ROWS = 256
#: An RBF kernel of more inputs is not looked at as a product of kernels of single ones.
MOST_GRID_INPUTS = 3
#: Most distinct points for each datum, where data share them.
MOST_POINTS = 0.75


@dataclass(frozen=True)
class RadialInputs:
    """A kernel as f(|x1_i - x2_j|^2), times outputscales.

    Attributes:
        points: the inputs [*b, n, d] behind the columns: x2, or x1.
        x1, x2: scaled inputs [*b, n, k] and [*b, m, k]; x2 None is x1.
        function: f.
        alpha: [*b, 1], rational quadratic only.
        angles: the first so many coordinates are those of circles.
        outputscales: each [*b].
    """

    points: Tensor
    x1: Tensor
    x2: Tensor | None
    function: RadialFunction
    alpha: Tensor | None = None
    angles: int = 0
    outputscales: tuple[Tensor, ...] = ()


def radial_factors(kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None) -> list[RadialInputs]:
    """A kernel as a product of radial ones, of x1 [*b, n, d] and x2 [*b, m, d] with active dims only; empty if it is none.

    The first has all outputscales.

    Raises:
        ValueError: lengthscales do not fit the inputs.
    """
    function = _radial_function(kernel)
    if function is not None:
        is_periodic = isinstance(kernel, kernels.PeriodicKernel)
        first, second = (_on_circles if is_periodic else _over_lengthscale)(kernel, x1, x2)
        alpha = kernel.alpha if function is RATIONAL_QUADRATIC else None
        points, angles = x1 if x2 is None else x2, first.shape[-1] if is_periodic else 0
        return [RadialInputs(points, first, second, function, alpha, angles)]
    leaves, outputscales = _factors(kernel, x1, x2)
    if any(leaf is kernel for leaf, *_ in leaves):
        return []
    factors = [radial_factors(*leaf) for leaf in leaves]
    if not factors or not all(factors):
        return []
    found = [factor for (factor,) in factors]
    return [replace(found[0], outputscales=outputscales), *found[1:]]


def on_grid(factors: Sequence[RadialInputs]) -> tuple[list[RadialInputs], list[Axis]] | None:
    """The same product and the axes of a grid that the inputs of its columns lie on, if products are then cheap.

    An RBF factor of few inputs becomes one of each if each is an axis and few cells are empty: the system then has an exact
    factor. Otherwise several matrices cost more than one.
    """
    single, parts_of_one = [], set()
    for factor in factors:
        columns = factor.x1.shape[-1]
        if factor.function is RBF and not factor.angles and 1 < columns <= MOST_GRID_INPUTS:
            parts_of_one.update(range(len(single), len(single) + columns))
            for column in range(columns):
                one = lambda x, column=column: None if x is None else x[..., column : column + 1]
                single.append(RadialInputs(one(factor.points), one(factor.x1), one(factor.x2), RBF))
        else:
            single.append(factor)
    if parts_of_one:
        axes = axes_of([factor.points for factor in single])
        is_apart = all(len(axis.factors) == 1 or parts_of_one.isdisjoint(axis.factors) for axis in axes)
        if axes and is_apart and own_cells(axes) is not None:
            return [replace(single[0], outputscales=factors[0].outputscales), *single[1:]], axes
    axes = axes_of([factor.points for factor in factors]) if len(factors) > 1 else []
    return (list(factors), axes) if axes else None


def with_one_gaussian(factors: Sequence[RadialInputs]) -> list[RadialInputs]:
    """The same product, whose RBF and periodic factors are one of all their inputs."""
    is_gaussian = lambda factor: factor.function is RBF
    gaussian = sorted(filter(is_gaussian, factors), key=lambda factor: not factor.angles)
    if len(gaussian) < 2:
        return list(factors)
    points, x1 = side_by_side([factor.points for factor in gaussian]), side_by_side([factor.x1 for factor in gaussian])
    x2 = None if gaussian[0].x2 is None else side_by_side([factor.x2 for factor in gaussian])
    angles = sum(factor.angles for factor in gaussian)
    found = [
        RadialInputs(points, x1, x2, RBF, None, angles),
        *(factor for factor in factors if not is_gaussian(factor)),
    ]
    return [replace(found[0], outputscales=factors[0].outputscales), *found[1:]]


def is_smooth_product(kernel: kernels.Kernel, x: Tensor) -> bool:
    """Whether a product of radial kernels of x [*b, n, d] is smooth where any of its inputs differ.

    A Matern kernel of some inputs has a kink at all points that share these.
    """
    leaves, _ = _factors(kernel, torch.arange(x.shape[-1], device=x.device).unsqueeze(0), None)
    used = {column for _, columns, _ in leaves for column in columns.flatten().tolist()}
    is_smooth = lambda leaf: _radial_function(leaf) in (RBF, RATIONAL_QUADRATIC)
    return all(is_smooth(leaf) or used == set(columns.flatten().tolist()) for leaf, columns, _ in leaves)


def _factors(kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None) -> tuple[list[_Factor], tuple[Tensor, ...]]:
    """The factors of a product, perhaps in scales, and their outputscales."""
    if type(kernel) is kernels.ScaleKernel:
        factors, outputscales = _factors(kernel.base_kernel, x1, x2)
        return factors, (kernel.outputscale, *outputscales)
    if type(kernel) is kernels.GridKernel:  # as at points beside its grid
        return _factors(kernel.base_kernel, x1, x2)
    if type(kernel) is not kernels.ProductKernel:
        return [(kernel, x1, x2)], ()
    parts = [_factors(part, active_inputs(part, x1), active_inputs(part, x2)) for part in kernel.kernels]
    return [factor for part, _ in parts for factor in part], tuple(scale for _, part in parts for scale in part)


def _over_lengthscale(kernel: kernels.Kernel, x1: Tensor, x2: Tensor | None) -> tuple[Tensor, Tensor | None]:
    # Integers are centred in float64: float32 would round time stamps in seconds to minutes.
    dtype = value_dtype(kernel, x1)
    x1, x2 = (x if x is None or x.is_floating_point() else x.double() for x in (x1, x2))
    # By the first columns: predictions and systems with new data then round the training data as training did.
    centre = _centre(kernel, x1 if x2 is None else x2)
    x1, x2 = (None if x is None else (x - centre).to(dtype) / kernel.lengthscale for x in (x1, x2))
    return x1, x2


def _on_circles(kernel: kernels.PeriodicKernel, x1: Tensor, x2: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """[*b, n, 2d]: all cosines, then all sines. Phases are float64: float32 would round those of many periods."""
    dtype, period, root = value_dtype(kernel, x1), kernel.period_length.double(), kernel.lengthscale.double().sqrt()
    # Turning all points changes nothing, so derivatives by the period need not grow with the distance from zero.
    centre = _centre(kernel, x1 if x2 is None else x2).double()
    start = (centre / period.detach()).remainder(1.0)

    def scaled(x: Tensor) -> Tensor:
        turns = (x.double() - centre) / period
        angles = 2 * math.pi * (turns - turns.detach().round() + start)
        return torch.cat([angles.cos() / root, angles.sin() / root], dim=-1).to(dtype)

    return scaled(x1), None if x2 is None else scaled(x2)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Columns [*b, k] of all parts, whose other dimensions are broadcast."""
    batch = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*batch, part.shape[-1]) for part in parts], dim=-1)


def _centre(kernel: kernels.Kernel, x: Tensor) -> Tensor:
    """The median [*b, 1, d]: float32 loses digits far from the origin, and an outlier would move a mean."""
    if kernel.ard_num_dims not in (None, 1, x.shape[-1]):
        raise ValueError(
            f"The {type(kernel).__name__} has ard_num_dims={kernel.ard_num_dims}, but its inputs have shape "
            f"{tuple(x.shape)}: set ard_num_dims={x.shape[-1]}, or active_dims."
        )
    ordered = x.detach()[..., :CENTRE_ROWS, :].sort(dim=-2).values
    middle = ordered.shape[-2] // 2
    return ordered[..., middle : middle + 1, :] if ordered.shape[-2] else ordered.new_zeros(1, x.shape[-1])


def value_dtype(kernel: kernels.Kernel, x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else kernel.dtype


def active_inputs(kernel: kernels.Kernel, x: Inputs) -> Inputs:
    """The kernel's active columns [*b, n, d] of x [*b, n, D], or None. Raises ValueError if x has no such column."""
    if x is None or kernel.active_dims is None:
        return x
    dims, size = kernel.active_dims.tolist(), x.shape[-1]
    if any(not 0 <= dim < size for dim in dims):
        raise ValueError(
            f"{type(kernel).__name__} has active_dims={dims}, but its inputs have {size} columns, which count from 0."
        )
    return x.index_select(-1, kernel.active_dims)


def repeated_points(kernel: kernels.Kernel, x: Tensor) -> Axis | None:
    """The distinct points of x [n, D] for a kernel, if many data share one."""
    if any(isinstance(part, kernels.InducingPointKernel) for part in kernel.modules()):
        return None  # in predictions its diagonal is larger, of each datum by itself
    read = _read_columns(kernel, torch.arange(x.shape[-1], device=x.device))
    return repeated_inputs(x.index_select(-1, read), MOST_POINTS * len(x))


def _read_columns(kernel: kernels.Kernel, columns: Tensor) -> Tensor:
    """Those of the columns [D] that a kernel reads; of a multiple, sum or product, those that its parts read."""
    if kernel.active_dims is not None:
        return active_inputs(kernel, columns)
    if type(kernel) is kernels.ScaleKernel:
        return _read_columns(kernel.base_kernel, columns)
    if type(kernel) is kernels.AdditiveKernel or type(kernel) is kernels.ProductKernel:
        return torch.cat([_read_columns(part, columns) for part in kernel.kernels]).unique()
    return columns


def computes_the_same(kernel: kernels.Kernel, base: type[kernels.Kernel]) -> bool:
    """Whether a kernel overrides no computation of this base class."""
    names = ("forward", "__call__", "covar_dist", "lengthscale")
    return all(getattr(type(kernel), name) is getattr(base, name) for name in names) and "forward" not in vars(kernel)


def _radial_function(kernel: kernels.Kernel) -> RadialFunction | None:
    if isinstance(kernel, (kernels.MaternKernel, kernels.keops.MaternKernel)):
        base, function = kernels.MaternKernel, MATERN.get(kernel.nu)
    elif isinstance(kernel, (kernels.RBFKernel, kernels.keops.RBFKernel)):
        base, function = kernels.RBFKernel, RBF
    elif isinstance(kernel, kernels.RQKernel):
        base, function = kernels.RQKernel, RATIONAL_QUADRATIC
    elif (
        isinstance(kernel, kernels.PeriodicKernel)
        and type(kernel).period_length is kernels.PeriodicKernel.period_length
    ):
        base, function = kernels.PeriodicKernel, RBF  # of points on circles
    else:
        return None
    is_keops = type(kernel) in (kernels.keops.RBFKernel, kernels.keops.MaternKernel)
    return function if is_keops or computes_the_same(kernel, base) else None

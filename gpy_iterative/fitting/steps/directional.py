"""Derivatives of a product H a along the coordinates, q_i = (dH/dt_i) a, without the matrices dH/dt_i.

Autograd carries directions to the operator's tensors. From there, radial kernels, sums, multiples, several
outputs, noise and missing data have closed forms; other operators use central differences.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from linear_operator import LinearOperator, to_dense
from linear_operator.operators import BlockInterleavedLinearOperator, ConstantMulLinearOperator, SumLinearOperator
from torch import Tensor

from gpy_iterative.fitting.coordinates import Coordinates
from gpy_iterative.linear_operators.extensions import in_float64
from gpy_iterative.linear_operators.generic_kernel import GenericKernelLinearOperator
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.masked import ObservedLinearOperator, spread_rows
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator

#: Tolerance for inputs that move by a scale, relative to the largest move.
ROUNDING = 1e-4
#: Of an operator's tensors; None for zero.
Tangent = Sequence[Tensor | None]


def tangents(tensors: Sequence[Tensor], coordinates: Coordinates) -> Iterator[Tangent]:
    """The derivatives of the tensors by each coordinate.

    GPyTorch's graphs have no forward mode; the derivative of a vector-Jacobian product by its vector replaces it.
    """
    wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    covectors = [torch.zeros_like(tensors[index], requires_grad=True) for index in wanted]
    pulled: Sequence[Tensor | None] = [None] * len(coordinates.parameters)
    if wanted:
        outputs = [tensors[index] for index in wanted]
        pulled = torch.autograd.grad(outputs, coordinates.parameters, covectors, create_graph=True, allow_unused=True)
    for number, direction in coordinates.directions():
        tangent: list[Tensor | None] = [None] * len(tensors)
        gradient = pulled[number]
        if gradient is not None:
            found = torch.autograd.grad(gradient, covectors, direction, retain_graph=True, allow_unused=True)
            for index, part in zip(wanted, found, strict=True):
                tangent[index] = part
        yield tangent


class DirectionalProduct(ABC):
    """Derivative of `operator @ vector` along tangents of `operator.representation()`."""

    def __init__(self, operator: Any, vector: Tensor) -> None:
        self.operator, self.vector = operator, vector

    def along(self, tangent: Tangent) -> Tensor | None:
        """[*b, n]; None where nothing moves."""
        return None if all(part is None for part in tangent) else self._along(tangent)

    @abstractmethod
    def _along(self, tangent: Tangent) -> Tensor | None: ...


class _Noisy(DirectionalProduct):
    def __init__(self, operator: NoisyLinearOperator, vector: Tensor) -> None:
        super().__init__(operator, vector)
        self._kernel = directional_product(operator.kernel, vector)

    def _along(self, tangent: Tangent) -> Tensor | None:
        *kernel, noise = tangent
        return _sum(self._kernel.along(kernel), None if noise is None else noise * self.vector)


class _Sum(DirectionalProduct):
    def __init__(self, operator: SumLinearOperator, vector: Tensor) -> None:
        super().__init__(operator, vector)
        self._terms = [directional_product(term, vector) for term in operator.linear_ops]

    def _along(self, tangent: Tangent) -> Tensor | None:
        total, rest = None, list(tangent)
        for term in self._terms:
            size = len(term.operator.representation())
            total, rest = _sum(total, term.along(rest[:size])), rest[size:]
        return total


class _Multiple(DirectionalProduct):
    def __init__(self, operator: ConstantMulLinearOperator, vector: Tensor) -> None:
        super().__init__(operator, vector)
        self._base = directional_product(operator.base_linear_op, vector)

    @cached_property
    def _base_product(self) -> Tensor:
        return _product(self.operator.base_linear_op, self.vector)

    def _along(self, tangent: Tangent) -> Tensor | None:
        *base, constant = tangent
        own = self._base.along(base)
        scaled = None if own is None else own * self.operator._constant.detach().unsqueeze(-1)
        return _sum(scaled, None if constant is None else constant.unsqueeze(-1) * self._base_product)


class _Kronecker(DirectionalProduct):
    """d(K x B) a = dK A B^T + K A dB^T, for A [n, T] of a."""

    def __init__(self, operator: KroneckerLinearOperator, vector: Tensor) -> None:
        super().__init__(operator, vector)
        self._by_task = vector.unflatten(-1, (-1, operator.tasks.shape[-1]))
        mixed = self._by_task @ to_dense(operator.tasks).detach().mT
        self._points = [directional_product(operator.points, column) for column in mixed.unbind(-1)]
        # Of the unit vectors, as a batch.
        unit = torch.eye(operator.tasks.shape[-1], dtype=vector.dtype, device=vector.device)
        units = unit.view(len(unit), *[1] * len(operator.batch_shape), len(unit))
        self._tasks = directional_product(operator.tasks, units)

    @cached_property
    def _point_product(self) -> Tensor:
        with torch.no_grad():
            return self.operator.points._matmul(self._by_task)

    def _along(self, tangent: Tangent) -> Tensor | None:
        size = len(self.operator.points.representation())
        columns = [product.along(tangent[:size]) for product in self._points]
        of_points = None if columns[0] is None else torch.stack(columns, dim=-1).flatten(-2)
        moved = self._tasks.along(tangent[size:])
        of_tasks = None if moved is None else (self._point_product @ moved.movedim(0, -2)).flatten(-2)
        return _sum(of_points, of_tasks)


class _Interleaved(DirectionalProduct):
    """Of independent functions, point by point."""

    def __init__(self, operator: BlockInterleavedLinearOperator, vector: Tensor) -> None:
        super().__init__(operator, vector)
        by_function = vector.unflatten(-1, (-1, operator.num_blocks)).mT
        self._functions = directional_product(operator.base_linear_op, by_function)

    def _along(self, tangent: Tangent) -> Tensor | None:
        found = self._functions.along(tangent)
        return None if found is None else found.mT.flatten(-2)


class _Selected(DirectionalProduct):
    """Rows and columns of a whole operator: observed data, or each datum's task."""

    def __init__(self, operator: ObservedLinearOperator, vector: Tensor) -> None:
        super().__init__(operator, vector)
        spread = spread_rows(vector.unsqueeze(-1), operator.observed, operator.base.shape[-1]).squeeze(-1)
        self._whole = directional_product(operator.base, spread)

    def _along(self, tangent: Tangent) -> Tensor | None:
        found = self._whole.along(tangent[:-2])  # without the numbers of rows and columns
        return None if found is None else found[..., self.operator.observed]


class _Radial(DirectionalProduct):
    @cached_property
    def _scales(self) -> Tensor:
        return self.operator.scale_products(self.vector)

    @cached_property
    def _per_outputscale(self) -> Tensor:
        return _product(self.operator, self.vector) / self.operator.outputscale.detach().unsqueeze(-1)

    @cached_property
    def _alpha(self) -> Tensor:
        return self.operator.alpha_product(self.vector)

    @cached_property
    def _differences(self) -> "_Differences":
        return _Differences(self.operator, self.vector)

    def _along(self, tangent: Tangent) -> Tensor | None:
        x1, outputscale, alpha = (*tangent, None)[:3]
        if not self.has_closed_form(x1):
            return self._differences.along(tangent)
        rates = None if x1 is None else self._rates(x1)
        total = None if rates is None else (self._scales * rates.unsqueeze(-2)).sum(-1)
        if x1 is not None and rates is None:
            total = self._turned(x1[..., : self.operator.angles])
        if outputscale is not None:
            total = _sum(total, outputscale.unsqueeze(-1) * self._per_outputscale)
        return total if alpha is None else _sum(total, alpha * self._alpha)

    def has_closed_form(self, x1: Tensor | None) -> bool:
        """Whether inputs move as scales do, or only on circles."""
        return x1 is None or self._rates(x1) is not None or not x1[..., self.operator.angles :].any()

    def _rates(self, moved: Tensor) -> Tensor | None:
        """Rates [*b, d] of inputs that move as x / lengthscale does; None for other moves."""
        x1 = self.operator.x1.detach()
        squares = x1.double().square().sum(-2).clamp_min(torch.finfo(torch.float64).tiny)
        rates = ((moved.double() * x1).sum(-2) / squares).to(x1)
        if not moved.numel():
            return rates
        is_scale = (moved - x1 * rates.unsqueeze(-2)).abs().max() <= ROUNDING * moved.abs().max()
        return rates if is_scale else None

    def _turned(self, moved: Tensor) -> Tensor:
        """sum_j -K_ij (x_i - x_j) . (m_i - m_j) a_j for moves m [*b, n, c] of points on circles, by products.

        Differences would move them along tangents, and points many periods away far off their circles.
        """
        x, a = self.operator.x1.detach()[..., : moved.shape[-1]], self.vector.unsqueeze(-1)
        along = (x * moved).sum(-1, keepdim=True)
        columns = torch.cat([torch.ones_like(along), along, x, moved], dim=-1) * a
        with torch.no_grad():
            found = self.operator._matmul(columns)
        plain, of_along, of_x, of_moved = found.split([1, 1, x.shape[-1], x.shape[-1]], dim=-1)
        return ((moved * of_x + x * of_moved).sum(-1, keepdim=True) - along * plain - of_along).squeeze(-1)


class _RadialProduct(DirectionalProduct):
    def __init__(self, operator: RadialProductLinearOperator, vector: Tensor) -> None:
        super().__init__(operator, vector)
        self._factors = [_Radial(product, vector) for product in operator.by_factor]

    @cached_property
    def _differences(self) -> "_Differences":
        return _Differences(self.operator, self.vector)

    def _along(self, tangent: Tangent) -> Tensor | None:
        total, rest = None, list(tangent)
        for factor in self._factors:
            size = len(factor.operator.representation())
            if not factor.has_closed_form(rest[0]):
                return self._differences.along(tangent)
            total, rest = _sum(total, factor.along(rest[:size])), rest[size:]
        return total


class _Differences(DirectionalProduct):
    """Central differences in float64: float32 rounding errors over the step would drown a small K a."""

    @cached_property
    def _converted(self) -> LinearOperator:
        return in_float64(self.operator, keeps_tiles=False)

    def _along(self, tangent: Tangent) -> Tensor:
        step = torch.finfo(torch.float64).eps ** 0.25
        tree = self._converted.representation_tree()
        tensors = [tensor.detach() for tensor in self._converted.representation()]  # masks of missing data stay bool
        moved = lambda sign: [
            tensor if part is None else tensor + sign * step * part
            for tensor, part in zip(tensors, tangent, strict=True)
        ]
        above, below = (_product(tree(*moved(sign)), self.vector.double()) for sign in (1, -1))
        return ((above - below) / (2 * step)).to(self.vector.dtype)


def directional_product(operator: LinearOperator, vector: Tensor) -> DirectionalProduct:
    if isinstance(operator, NoisyLinearOperator):
        return _Noisy(operator, vector)
    if isinstance(operator, SumLinearOperator):
        return _Sum(operator, vector)
    if isinstance(operator, ConstantMulLinearOperator):
        return _Multiple(operator, vector)
    if isinstance(operator, ObservedLinearOperator):
        return _Selected(operator, vector)
    if isinstance(operator, BlockInterleavedLinearOperator):
        return _Interleaved(operator, vector)
    if isinstance(operator, KroneckerLinearOperator):
        return _Kronecker(operator, vector)
    if isinstance(operator, RadialKernelLinearOperator) and operator.symmetric:
        return _Radial(operator, vector)
    if isinstance(operator, RadialProductLinearOperator) and operator.symmetric:
        return _RadialProduct(operator, vector)
    if isinstance(operator, GenericKernelLinearOperator) and operator._kwargs["leaves"]:
        raise NotImplementedError(
            f"There is no average information for a {type(operator.kernel).__name__} that uses tensors which require a "
            "gradient and are not its own parameters: register them as parameters of the kernel."
        )
    return _Differences(operator, vector)


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


@torch.no_grad()
def _product(operator: LinearOperator, vector: Tensor) -> Tensor:
    return operator._matmul(vector.unsqueeze(-1)).squeeze(-1)

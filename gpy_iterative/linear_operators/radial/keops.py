"""Products and derivatives of radial kernels by KeOps.

Columns are padded to a few widths, because each takes seconds to compile.
"""

import hashlib
from collections.abc import Callable
from functools import cache as keep
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from gpy_iterative.linear_operators.extensions import Rows
from gpy_iterative.linear_operators.products import require_pykeops
from gpy_iterative.linear_operators.radial.functions import KeOpsFormulas, RadialFunction
from gpy_iterative.linear_operators.radial.tiles import RadialDerivative, RadialTiles
from gpy_iterative.linear_operators.tiles.cache import Tile
from gpy_iterative.linear_operators.tiles.operator import BilinearWeights, TileWeights

try:
    from pykeops import get_build_folder
    from pykeops.torch import Genred
except ImportError:
    Genred, get_build_folder = None, None

#: Compiled widths. On a CPU one column costs as much as 8.
WIDTHS = (8, 32, 72)


class RadialKeOps(RadialTiles):
    """`RadialTiles` with products and derivatives from differences of inputs."""

    def product(
        self, rows: Rows, columns: slice, rhs: Tensor, values: Callable[[Tile], Tensor] | None = None
    ) -> Tensor:
        if values is not None:
            return super().product(rows, columns, rhs, values)
        x1, x2 = self._scaled_inputs()
        return kernel_sum(self.function, x1[..., rows, :], x2[..., columns, :], self.alpha, rhs)

    def picked_product(self, rows: Tensor, rhs: Tensor) -> Tensor:
        return self.product(rows, slice(None), rhs)

    def derivative(self, weights: TileWeights, *, value: bool, alpha: bool) -> RadialDerivative:
        """See `RadialTiles.derivative`; one pass, or two without symmetry."""
        if not isinstance(weights, BilinearWeights):
            return super().derivative(weights, value=value, alpha=alpha)
        (x1, x2), left, right = self._scaled_inputs(), weights.left, weights.right
        dimension, factor = x1.shape[-1], 2 / self.function.scale(self.alpha) ** 0.5
        rows = derivative_sum(self.function, x1, x2, self.alpha, left, right)
        sums = rows[..., dimension:].sum(-2, dtype=torch.float64)
        dx2 = None
        if self.symmetric:
            sums = sums / 2  # factors of W + W^T
        else:
            dx2 = factor * derivative_sum(self.function, x2, x1, self.alpha, right, left)[..., :dimension]
        dalpha = sums[..., 1] if sums.shape[-1] > 1 else torch.zeros_like(sums[..., 0])
        return RadialDerivative(factor * rows[..., :dimension], sums[..., 0], dalpha, dx2)

    def _scaled_inputs(self) -> tuple[Tensor, Tensor]:
        root = self.function.scale(self.alpha) ** 0.5
        return self.x1 * root, self.x2 * root


def kernel_sum(function: RadialFunction, x: Tensor, y: Tensor, alpha: Tensor | None, v: Tensor) -> Tensor:
    """sum_j f(|x_i - y_j|^2) v_j [*b, n, s], for x [*b, n, d], y [*b, m, d] and v [*b, m, s]."""
    parts = []
    for columns, width in column_blocks(v.shape[-1]):
        program = _kernel_sum(function, x.shape[-1], width)
        total = _over_batch(program, alpha, x, y, _padded(v[..., columns], width))
        parts.append(total[..., : columns.stop - columns.start])
    return torch.cat(parts, dim=-1)


def derivative_sum(
    function: RadialFunction, x: Tensor, y: Tensor, alpha: Tensor | None, left: Tensor, right: Tensor
) -> Tensor:
    """sum_j (l_i . r_j) [df/dq (x_i - y_j), f, df/dalpha] for l [*b, n, s] and r [*b, m, s], otherwise as `kernel_sum`.

    [*b, n, d + 2], without alpha [*b, n, d + 1].
    """
    total = x.new_zeros(())
    for columns, width in column_blocks(left.shape[-1]):
        program = _derivative_sum(function, x.shape[-1], width)
        vectors = (_padded(left[..., columns], width), _padded(right[..., columns], width))
        total = total + _over_batch(program, alpha, x, y, *vectors)
    return total


def column_blocks(size: int) -> list[tuple[slice, int]]:
    blocks, start = [], 0
    while start < size or not blocks:
        width = next((width for width in WIDTHS if width >= size - start), WIDTHS[-1])
        blocks.append((slice(start, min(start + width, size)), width))
        start += width
    return blocks


class _Program:
    """A KeOps reduction, compiled by one process at a time: others would load an unfinished library."""

    def __init__(self, formula: str, function: RadialFunction, dimension: int, *vectors: str) -> None:
        require_pykeops()
        variables = [f"x = Vi({dimension})", f"y = Vj({dimension})", *vectors]
        if _formulas(function).alpha_derivative is not None:
            variables.append("alpha = Pm(1)")
        formula = formula.format(u="SqDist(x,y)")
        self._text = "|".join((formula, *variables))
        self._sum = Genred(formula, variables, reduction_op="Sum", axis=1)
        self._compiled: set[tuple[torch.dtype, torch.device]] = set()

    def __call__(self, *tensors: Tensor) -> Tensor:
        kind = (tensors[0].dtype, tensors[0].device)
        # By default KeOps moves CPU tensors to any GPU.
        backend = "GPU" if tensors[0].is_cuda else "CPU"
        if kind not in self._compiled:
            name = hashlib.sha256(f"{self._text}|{kind}".encode()).hexdigest()[:16]
            with FileLock(Path(get_build_folder()) / f"gpy_iterative_{name}.lock"):
                self._sum(*(tensor[:1] for tensor in tensors), backend=backend)
            self._compiled.add(kind)
        return self._sum(*tensors, backend=backend)


@keep
def _kernel_sum(function: RadialFunction, dimension: int, width: int) -> _Program:
    return _Program(f"({_formulas(function).value}) * v", function, dimension, f"v = Vj({width})")


@keep
def _derivative_sum(function: RadialFunction, dimension: int, width: int) -> _Program:
    formulas = _formulas(function)
    terms = f"Concat(({formulas.derivative}) * (x - y), {formulas.value})"
    if formulas.alpha_derivative is not None:
        terms = f"Concat({terms}, {formulas.alpha_derivative})"
    return _Program(f"(l | r) * {terms}", function, dimension, f"l = Vi({width})", f"r = Vj({width})")


def _formulas(function: RadialFunction) -> KeOpsFormulas:
    if function.keops is None:
        raise ValueError(
            f"The {function.name} function has no KeOps formula: use KernelProducts(backend='auto'), or set its `keops`."
        )
    return function.keops


def _padded(v: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(v, (0, width - v.shape[-1]))


def _over_batch(program: _Program, alpha: Tensor | None, *tensors: Tensor) -> Tensor:
    """The results of all batch members: KeOps broadcasts unreliably."""
    every = tensors if alpha is None else (*tensors, alpha.unsqueeze(-1))
    batch = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in every))
    members = [tensor.expand(*batch, *tensor.shape[-2:]).reshape(batch.numel(), *tensor.shape[-2:]) for tensor in every]
    results = torch.stack([program(*(t.contiguous() for t in member)) for member in zip(*members, strict=True)])
    return results.reshape(*batch, *results.shape[-2:])

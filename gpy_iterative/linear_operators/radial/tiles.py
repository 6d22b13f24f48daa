"""Tiles of a radial kernel matrix: squared distances, mostly from one GEMM, and a few in-place passes each."""

import threading
from functools import cache as keep
from functools import cached_property
from types import FunctionType

import torch
from torch import Tensor

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.derivative import DerivativePass, RadialDerivative
from gpy_iterative.linear_operators.radial.functions import RadialFunction
from gpy_iterative.linear_operators.radial.squared_distances import SquaredDistances
from gpy_iterative.linear_operators.tiles.cache import TileCache
from gpy_iterative.linear_operators.tiles.tiles import Tiles, blocks
from gpy_iterative.linear_operators.tiles.weights import TileWeights


class _CompiledLoop:
    """The passes over a tile in one loop.

    One piece of code is compiled so many times, anew for other numbers of dimensions, for a length of one and for another
    number of threads, and then runs pass by pass. So every function and dtype has code of its own, is given tiles that
    `_flat` has made alike, and is compiled by one thread while others wait: they would compile the same once more each.
    """

    def __init__(self, evaluate: FunctionType, function: RadialFunction, dtype: torch.dtype) -> None:
        evaluate.__code__ = evaluate.__code__.replace(co_name=f"{evaluate.__name__}_{function.name}_{dtype}")
        # PyTorch's graph cache on disk does not tell processors apart: loops of AVX-512's width, which it hands to a
        # process without AVX-512 (another machine of a shared disk, ATEN_CPU_CAPABILITY), return wrong numbers. Without
        # it a function is translated once a process; what the C++ compiler makes of it is still cached, with the
        # processor in its key.
        self._evaluate = torch.compile(evaluate, dynamic=True, options={"fx_graph_cache": False})
        self._lock = threading.Lock()
        self._compiled: set[tuple[object, ...]] = set()

    def __call__(self, tiles: Tensor, *others: Tensor | None) -> None:
        # Detached: a view is compiled for the dimensions of what it is a view of, too.
        given = [None if tensor is None else tensor.detach() for tensor in (tiles, *others)]
        is_one = tuple(size == 1 for size in tiles.shape)
        variant = (is_one, tiles.device, torch.get_num_threads(), torch.is_inference_mode_enabled())
        if variant in self._compiled:
            self._evaluate(*given)
            return
        with self._lock:
            self._evaluate(*given)
            self._compiled.add(variant)


def _flat(tiles: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Tiles [*b, g, rows, columns] without dimensions, or with one where alpha [*b, 1] has several values."""
    if alpha is None or alpha.numel() == 1:
        return tiles.view(-1), None if alpha is None else alpha.view(())
    alpha = alpha.squeeze(-1).expand(tiles.shape[:-3]).reshape(-1)
    return tiles.view(len(alpha), -1), alpha


@keep
def _fused_value(function: RadialFunction, dtype: torch.dtype) -> _CompiledLoop:
    """Clamp and radial function, in place, in one compiled loop."""

    def evaluate(u: Tensor, alpha: Tensor | None) -> None:
        u.copy_(function.value(function.clamp_(u), alpha))

    return _CompiledLoop(evaluate, function, dtype)


@keep
def _fused_value_and_derivative(function: RadialFunction, dtype: torch.dtype) -> _CompiledLoop:
    """Clamp, radial function and its derivative, in place, in one compiled loop."""

    def evaluate(u: Tensor, derivative: Tensor, alpha: Tensor | None) -> None:
        function.value_and_derivative_(function.clamp_(u), derivative, alpha)

    return _CompiledLoop(evaluate, function, dtype)


class RadialTiles(Tiles):
    """f(|x1_i - x2_j|^2) in tiles, without the outputscale; symmetric when x2 is None.

    Args:
        x1, x2: scaled inputs [*b, n, d] and [*b, m, d] (or None).
        function, alpha: the radial function, and its alpha [*b, 1] or None.
        products: tile size, memory for kept tiles, compilation.
        cache: where evaluated tiles are kept.
    """

    def __init__(
        self,
        x1: Tensor,
        x2: Tensor | None,
        function: RadialFunction,
        alpha: Tensor | None,
        products: KernelProducts,
        cache: TileCache,
    ) -> None:
        self.x1, self.x2 = x1.detach(), None if x2 is None else x2.detach()
        self.alpha = None if alpha is None else alpha.detach()
        self._strip_alpha = None if alpha is None else alpha.detach().unsqueeze(-1)
        columns = self.x1 if self.x2 is None else self.x2
        self._is_fused, length = products.is_fused(x1.device), products.tile_rows(x1.device)
        tiles = {"rows": blocks(x1.shape[-2], length), "columns": blocks(columns.shape[-2], length)}
        scale = function.scale(self.alpha)
        self.distances = SquaredDistances(self.x1, columns, scale, has_kink=function.has_kink, **tiles)
        self.function = function if self.distances.together else function.at_exact_distances()
        super().__init__(
            torch.Size((*self.distances.batch_shape, x1.shape[-2], columns.shape[-2])),
            symmetric=x2 is None,
            **tiles,
            # The very tensors, not detached copies: they are what the cache recognises its owner by.
            owner=tuple(tensor for tensor in (x1, x2, alpha) if tensor is not None),
            like=x1,
            products=products,
            cache=cache,
        )

    def evaluate(self, i: int, columns: range, out: Tensor) -> Tensor:
        u = self._squared_distances(i, columns, out)
        if self._is_fused:
            _fused_value(self.function, u.dtype)(*_flat(u, self.alpha))
            return u
        return self.function.value_(self.function.clamp_(u), self.scratch(out.shape, 1), self._strip_alpha)

    @property
    def keeps_derivatives(self) -> bool:
        """Whether df/dq is kept beside f, whose evaluation has it at hand: a gradient that follows needs both."""
        return any(tensor.requires_grad for tensor in self._owner)

    def _evaluated_to_keep(self, i: int, columns: range, out: Tensor) -> Tensor:
        if self.keeps_derivatives:
            evaluate = lambda derivative: self._evaluate_both(i, columns, out, derivative)[1]
            kept = self.cache.derivatives().evaluate((i, columns[0]), out.shape, out, self._budget, evaluate)
            if kept is not None:
                return out
        return super()._evaluated_to_keep(i, columns, out)

    def value_and_derivative(self, i: int, columns: range) -> tuple[Tensor, Tensor]:
        """F, and df/dq over its factor, of a strip: valid as what `strip_part` returns is, and of a claimed cache."""
        kept = self._kept_value_and_derivative(i, columns)
        if kept is not None:
            return kept
        shape = self.strip_shape(i, columns)
        return self._evaluate_both(i, columns, self.scratch(shape, 0), self.scratch(shape, 1))

    def _kept_value_and_derivative(self, i: int, columns: range) -> tuple[Tensor, Tensor] | None:
        if not self.keeps_derivatives:
            return None
        key = (i, columns[0])
        value, derivative = self.cache.get(key), self.cache.derivatives().get(key)
        return None if value is None or derivative is None else (value, derivative)

    def _evaluate_both(self, i: int, columns: range, value: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
        u = self._squared_distances(i, columns, value)
        if self._is_fused:
            flat, alpha = _flat(u, self.alpha)
            _fused_value_and_derivative(self.function, u.dtype)(flat, derivative.view(flat.shape), alpha)
            return u, derivative
        return self.function.value_and_derivative_(self.function.clamp_(u), derivative, self._strip_alpha)

    def alpha_derivative(self, i: int, columns: range) -> Tensor:
        """df/dalpha of a strip."""
        out = self.scratch(self.strip_shape(i, columns), 0)
        u = self.function.clamp_(self._squared_distances(i, columns, out))
        return self.function.alpha_derivative(u, self._strip_alpha)

    def derivative(
        self, weights: TileWeights, *, value: bool, alpha: bool, scales_only: bool = False
    ) -> RadialDerivative:
        """The derivative for W = weights, in one pass.

        `value` and `alpha` say whether these parts are wanted; they are 0 where not. `scales_only` takes one GEMM less.
        """
        return DerivativePass(self, weights, value=value, alpha=alpha, scales_only=scales_only).run()

    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        chosen = self._row_numbers[rows]
        first, stop, step = columns.indices(self.shape[-1])
        u = self.distances.block(chosen, torch.arange(first, stop, step, device=chosen.device))
        if self.symmetric:
            _zero_own_distances(u, chosen, first)
        self.function.clamp_(u)
        return self.function.value_(u, torch.empty_like(u), self.alpha)

    @cached_property
    def _row_numbers(self) -> Tensor:
        """Of all rows: what an index, whatever its kind, picks from."""
        return torch.arange(self.shape[-2], device=self.x1.device)

    def _squared_distances(self, i: int, columns: range, out: Tensor) -> Tensor:
        """May be slightly negative; zero on the diagonal, whatever the rounding."""
        scratch = self.scratch(out.shape, 1)
        u = self.distances.strip(i, columns, out=out, scratch=scratch)
        if self.symmetric and i == columns[0]:
            u.diagonal(dim1=-2, dim2=-1).zero_()
        return u


def _zero_own_distances(u: Tensor, rows: Tensor, first: int) -> None:
    """Zero where a row meets its own column, of distances [*b, rows, columns] from the column `first` on."""
    place = (rows - first).expand(u.shape[:-1]).unsqueeze(-1)
    index = place.clamp(0, u.shape[-1] - 1)
    u.scatter_(-1, index, u.gather(-1, index).masked_fill(index == place, 0.0))

"""Element-wise work of a tile, compiled by `torch.compile`."""

import threading
from functools import cache
from types import FunctionType

import torch
from torch import Tensor

from gpy_iterative.linear_operators.radial.functions import RadialFunction


def fused_value_(function: RadialFunction, u: Tensor, alpha: Tensor | None) -> Tensor:
    """Clamps u [*b, rows, columns] and overwrites it with the value."""
    flat, alpha = _flat(u, alpha)
    _compiled_value(function, u.dtype)(flat, alpha)
    return u


def fused_value_and_derivative_(
    function: RadialFunction, u: Tensor, derivative: Tensor, alpha: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Clamps u [*b, rows, columns], and overwrites it and `derivative`."""
    flat, alpha = _flat(u, alpha)
    _compiled_value_and_derivative(function, u.dtype)(flat, derivative.view(flat.shape), alpha)
    return u, derivative


class _CompiledLoop:
    """The passes over a tile in one loop.

    torch.compile compiles one code object only a few times (by dimensions, lengths of one, threads), then runs it
    uncompiled. So every function and dtype has its own code and uniform tiles (`_flat`). One thread compiles while others
    wait.
    """

    def __init__(self, evaluate: FunctionType, function: RadialFunction, dtype: torch.dtype) -> None:
        evaluate.__code__ = evaluate.__code__.replace(co_name=f"{evaluate.__name__}_{function.name}_{dtype}")
        # No graph cache on disk: it ignores the processor, and AVX-512 code gives wrong numbers without AVX-512 (shared
        # disk, ATEN_CPU_CAPABILITY). The C++ compiler's cache includes the processor.
        self._evaluate = torch.compile(evaluate, dynamic=True, options={"fx_graph_cache": False})
        self._lock = threading.Lock()
        self._compiled: set[tuple[object, ...]] = set()

    def __call__(self, tiles: Tensor, *others: Tensor | None) -> None:
        # Detached: views are compiled for their base's dimensions, too.
        given = [None if tensor is None else tensor.detach() for tensor in (tiles, *others)]
        is_one = tuple(size == 1 for size in tiles.shape)
        variant = (is_one, tiles.device, torch.get_num_threads(), torch.is_inference_mode_enabled())
        if variant in self._compiled:
            self._evaluate(*given)
            return
        with self._lock:
            self._evaluate(*given)
            self._compiled.add(variant)


def _flat(tile: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A tile [*b, rows, columns] as a vector, or as a matrix for several values of alpha [*b, 1]."""
    if alpha is None or alpha.numel() == 1:
        return tile.view(-1), None if alpha is None else alpha.view(())
    alpha = alpha.squeeze(-1).expand(tile.shape[:-2]).reshape(-1)
    return tile.view(len(alpha), -1), alpha


@cache
def _compiled_value(function: RadialFunction, dtype: torch.dtype) -> _CompiledLoop:
    def evaluate(u: Tensor, alpha: Tensor | None) -> None:
        u.copy_(function.value(function.clamp_(u), alpha))

    return _CompiledLoop(evaluate, function, dtype)


@cache
def _compiled_value_and_derivative(function: RadialFunction, dtype: torch.dtype) -> _CompiledLoop:
    def evaluate(u: Tensor, derivative: Tensor, alpha: Tensor | None) -> None:
        function.value_and_derivative_(u, derivative, alpha)

    return _CompiledLoop(evaluate, function, dtype)

"""The twin of an operator in lower precision: what the iterations of a solve run on.

The operator itself stays in its own precision, and measures how far a solution really is.
"""

from typing import Any

import torch
from linear_operator import LinearOperator

from gpy_iterative.linear_operators.precision import EPS
from gpy_iterative.linear_operators.tiles import TiledLinearOperator


def lower_precision(operator: LinearOperator) -> tuple[LinearOperator, float] | None:
    """The twin in float32, and the relative rounding error of its entries; None where no part of it asks for one.

    Kernels compute in what their `KernelProducts.precision` says, and every other part, whatever it is composed of, in
    float32. Nothing is evaluated here. The twin carries no gradient.

    Raises:
        ValueError: a kernel's dtype or device does not allow its precision.
    """
    asked_for = {kernel.products.precision for kernel in _kernels(operator) if kernel.products.lowered() is not None}
    return (_lowered(operator), max(EPS[precision] for precision in asked_for)) if asked_for else None


def _kernels(operator: LinearOperator) -> list[TiledLinearOperator]:
    if isinstance(operator, TiledLinearOperator):
        return [operator]
    parts = (*operator._args, *operator._kwargs.values())
    return [kernel for part in parts if isinstance(part, LinearOperator) for kernel in _kernels(part)]


def _lowered(part: Any) -> Any:
    if isinstance(part, TiledLinearOperator):
        lowered = part.lowered()
        return _rebuilt(part) if lowered is None else lowered
    if isinstance(part, LinearOperator):
        return _rebuilt(part)
    return part.detach().float() if torch.is_tensor(part) and part.is_floating_point() else part


def _rebuilt(operator: LinearOperator) -> LinearOperator:
    options = {name: _lowered(part) for name, part in operator._kwargs.items()}
    return type(operator)(*map(_lowered, operator._args), **options)

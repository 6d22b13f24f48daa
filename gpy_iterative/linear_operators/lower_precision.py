"""The twin of an operator in lower precision: what the iterations of a solve run on, unless it is asked for a native one.

The operator itself stays in its own precision, and measures how far a solution really is.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from linear_operator import LinearOperator

from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator
from gpy_iterative.linear_operators.tiles.precision import EPS, Precision


def lower_precision(operator: LinearOperator) -> tuple[LinearOperator, Precision] | None:
    """The twin in float32, and the coarsest precision of its kernels; None where no part of it asks for one.

    Kernels compute in what their `KernelProducts.precision` says, and every other part, whatever it is composed of, in
    float32. Nothing is evaluated here. The twin carries no gradient.

    Raises:
        ValueError: a kernel's dtype, device or own code does not allow its precision.
    """
    asked_for = {kernel.products.precision for kernel in _kernels_in_lower_precision(operator)}
    return (_lowered(operator), max(asked_for, key=lambda precision: EPS[precision])) if asked_for else None


def native_precision(operator: LinearOperator) -> LinearOperator:
    """The same matrix, which solvers iterate on as it is: tensors, gradients and kept tiles are the operator's own.

    What has to be reached whatever precision was asked for is solved with it. Nothing is evaluated here.
    """
    return _native(operator) if _kernels_in_lower_precision(operator) else operator


def _kernels_in_lower_precision(operator: LinearOperator) -> list[TiledLinearOperator]:
    if isinstance(operator, TiledLinearOperator):
        return [] if operator.products.lowered() is None else [operator]
    parts = (*operator._args, *operator._kwargs.values())
    return [
        kernel for part in parts if isinstance(part, LinearOperator) for kernel in _kernels_in_lower_precision(part)
    ]


def _lowered(part: Any) -> Any:
    if isinstance(part, TiledLinearOperator):
        lowered = part.lowered()
        return _rebuilt(part, _lowered) if lowered is None else lowered
    if isinstance(part, LinearOperator):
        return _rebuilt(part, _lowered)
    if isinstance(part, torch.dtype):  # operators without tensors are told theirs
        return torch.float32 if part.is_floating_point else part
    return part.detach().float() if torch.is_tensor(part) and part.is_floating_point() else part


def _native(part: Any) -> Any:
    if isinstance(part, TiledLinearOperator):
        products = replace(part.products, precision="native")
        return type(part)(*part._args, **part._kwargs | {"products": products})
    return _rebuilt(part, _native) if isinstance(part, LinearOperator) else part


def _rebuilt(operator: LinearOperator, change: Callable[[Any], Any]) -> LinearOperator:
    options = {name: change(part) for name, part in operator._kwargs.items()}
    return type(operator)(*map(change, operator._args), **options)

"""Copies of operators in float32, which the iterations of a solve multiply by.

The operator itself keeps its own precision. Iterative refinement measures true residuals with it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from linear_operator import LinearOperator

from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator


def low_precision_copy(operator: LinearOperator) -> LinearOperator | None:
    """A copy of the operator in float32, without gradient; None where no kernel in it has `precision="float32"`.

    Nothing is evaluated here.

    Raises:
        ValueError: a kernel's dtype or own code does not allow float32.
    """
    return _copy(operator) if _has_low_precision(operator) else None


def native_precision(operator: LinearOperator) -> LinearOperator:
    """The same operator with `precision="native"`: it shares tensors, gradients and kept tiles. Nothing is evaluated."""
    return _native(operator) if _has_low_precision(operator) else operator


def _has_low_precision(operator: LinearOperator) -> bool:
    if isinstance(operator, TiledLinearOperator):
        return operator.products.precision != "native"
    parts = (*operator._args, *operator._kwargs.values())
    return any(_has_low_precision(part) for part in parts if isinstance(part, LinearOperator))


def _copy(part: Any) -> Any:
    if isinstance(part, TiledLinearOperator) and _has_low_precision(part):
        return part.low_precision_copy()
    if isinstance(part, LinearOperator):
        return _rebuilt(part, _copy)
    if isinstance(part, torch.dtype):  # an argument of operators without tensors
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

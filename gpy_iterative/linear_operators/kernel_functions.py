"""Kernels as functions of their tensors, for several threads.

Copies of the modules are called: other threads would see the parameters of `functional_call` and GPyTorch's setting for
eager evaluation.
"""

import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, reduce
from typing import Any

import gpytorch
import torch
from gpytorch import kernels
from gpytorch.kernels.keops.keops_kernel import KeOpsKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import LinearOperator, to_dense, to_linear_operator
from linear_operator.operators import InterpolatedLinearOperator, SumLinearOperator
from torch import Tensor
from torch.func import functional_call

from gpy_iterative.linear_operators.interpolated import GridLinearOperator
from gpy_iterative.linear_operators.module_copies import ModuleCopies
from gpy_iterative.linear_operators.radial.squared_distances import differentiable_squared_distances, needs_differences
from gpy_iterative.linear_operators.radial_inputs import active_inputs

#: Held while a process-wide setting is changed: overlapping changes would not restore it.
GPYTORCH_SETTINGS = threading.RLock()


class _Eager(kernels.Kernel):
    def covar_dist(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        square_dist: bool = False,
        **params: Any,
    ) -> Tensor:
        """Exact where rounding would dominate: few dimensions, or inputs of wide range."""
        if diag or not needs_differences(x1, x2):
            return super().covar_dist(x1, x2, diag, last_dim_is_batch, square_dist, **params)
        if last_dim_is_batch:
            x1, x2 = x1.mT.unsqueeze(-1), x2.mT.unsqueeze(-1)
        squares = differentiable_squared_distances(x1, x2)
        if torch.equal(x1, x2):
            squares = squares.masked_fill(torch.eye(x1.shape[-2], dtype=torch.bool, device=x1.device), 0.0)
        return squares if square_dist else squares.clamp_min(1e-30).sqrt()

    def __call__(
        self, x1: Tensor, x2: Tensor | None = None, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> LinearOperator | Tensor:
        if diag:
            x1, x2 = (x if x.dim() > 1 else x.unsqueeze(-1) for x in (x1, x1 if x2 is None else x2))
            return self._eager_diagonal(active_inputs(self, x1), active_inputs(self, x2), last_dim_is_batch, **params)
        result = super().__call__(x1, x2, last_dim_is_batch=last_dim_is_batch, **params)
        if not isinstance(result, LazyEvaluatedKernelTensor):
            return result
        given = {"diag": False, "last_dim_is_batch": result.last_dim_is_batch, **result.params}
        return to_linear_operator(gpytorch.Module.__call__(self, result.x1, result.x2, **given))

    def _eager_diagonal(self, x1: Tensor, x2: Tensor, last_dim_is_batch: bool, **params: Any) -> Tensor:
        """`Kernel.__call__` takes the diagonals of as many members, or dimensions, as rows for a matrix."""
        found = gpytorch.Module.__call__(self, x1, x2, diag=True, last_dim_is_batch=last_dim_is_batch, **params)
        batch = torch.broadcast_shapes(self.batch_shape, x1.shape[:-2]) + x1.shape[-1:] * last_dim_is_batch
        rows = x1.shape[-2] * self.num_outputs_per_input(x1, x2)
        is_matrix = found.shape != (*batch, rows) and found.shape[-2:] == (rows, rows)
        # Some kernels ignore `diag`, as IndexKernel.
        return found.diagonal(dim1=-1, dim2=-2) if is_matrix or isinstance(found, LinearOperator) else found


class _EagerSum(kernels.AdditiveKernel):
    """A sum without linear_operator's low-rank update, which factorises the terms before it."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> LinearOperator | Tensor:
        if diag:
            return super().forward(x1, x2, diag=diag, **params)
        return SumLinearOperator(*(to_linear_operator(kernel(x1, x2, **params)) for kernel in self.kernels))


class _EagerProduct(kernels.ProductKernel):
    """A product without linear_operator's, of Cholesky factors: factors may be singular, or not positive definite."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        return reduce(torch.mul, (to_dense(kernel(x1, x2, diag=diag, **params)) for kernel in self.kernels))


class _EagerProductStructure(kernels.ProductStructureKernel):
    """A product without linear_operator's, which approximates factors or fails."""

    __call__ = _Eager.__call__  # GPyTorch's takes a diagonal for a matrix

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor:
        if last_dim_is_batch:
            return super().forward(x1, x2, diag, last_dim_is_batch, **params)  # refuses it
        factors = to_dense(self.base_kernel(x1, x2, diag=diag, last_dim_is_batch=True, **params))
        return factors.prod(-2 if diag else -3)


class _EagerGrid(kernels.GridInterpolationKernel):
    """An interpolation without linear_operator's sparse matrices, which warn."""

    def forward(self, *inputs: Tensor, **options: Any) -> LinearOperator | Tensor:
        found = super().forward(*inputs, **options)
        is_matrix = isinstance(found, InterpolatedLinearOperator) and not found.batch_shape
        return GridLinearOperator(*found._args) if is_matrix else found


@cache
def _eager(kind: type[kernels.Kernel]) -> type[kernels.Kernel]:
    pairs = (
        (kernels.AdditiveKernel, _EagerSum),
        (kernels.ProductKernel, _EagerProduct),
        (kernels.ProductStructureKernel, _EagerProductStructure),
        (kernels.GridInterpolationKernel, _EagerGrid),
    )
    for base, own in pairs:
        if kind.forward is base.forward:
            return types.new_class(kind.__name__, (own, kind, _Eager))
    return types.new_class(kind.__name__, (kind, _Eager))  # a kernel's own `__call__` comes first


def class_of(kernel: kernels.Kernel) -> type[kernels.Kernel]:
    """The kernel's class, also of an eager copy."""
    kind = type(kernel)
    return kind.__bases__[-2] if issubclass(kind, _Eager) else kind


def eager_copy(kernel: kernels.Kernel, own: tuple[str, ...] = ()) -> kernels.Kernel:
    """`own` as in `ModuleCopies`."""
    kind = lambda kind: _eager(kind) if issubclass(kind, kernels.Kernel) else kind
    copied = ModuleCopies(own=own, kind=kind).of(kernel)
    clear_caches(copied)
    return copied


def clear_caches(module: torch.nn.Module) -> None:
    """GPyTorch's caches ignore changes of hyperparameters."""
    for part in module.modules():
        if isinstance(part, gpytorch.Module):
            part._clear_cache()


def evaluated(kernel: kernels.Kernel, x1: Tensor, x2: Tensor, **options: Any) -> LinearOperator:
    """The kernel's `forward`, evaluated, on inputs with active dims only."""
    # `__call__` would select active dims again.
    with _settings(kernel):
        return to_linear_operator(gpytorch.Module.__call__(eager_copy(kernel), x1, x2, **options))


def kernel_matrix(kernel: kernels.Kernel, x1: Tensor, x2: Tensor) -> Tensor:
    """The dense k(x1, x2)."""
    with _settings(kernel):
        return to_dense(eager_copy(kernel)(x1, x2))


def kernel_diagonal(kernel: kernels.Kernel, x: Tensor) -> Tensor:
    with _settings(kernel):
        return eager_copy(kernel)(x, diag=True)


@contextmanager
def _settings(kernel: kernels.Kernel) -> Iterator[None]:
    """Locks settings for KeOps kernels, which must not compile for dense blocks, and for kernels that change them."""
    if any(isinstance(part, (KeOpsKernel, kernels.CylindricalKernel)) for part in kernel.modules()):
        with GPYTORCH_SETTINGS, gpytorch.settings.use_keops(False):
            yield
    else:
        yield


class _Forward(torch.nn.Module):
    def __init__(self, kernel: kernels.Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x1: Tensor, x2: Tensor, diag: bool) -> Tensor:
        return to_dense(gpytorch.Module.__call__(self.kernel, x1, x2, diag=diag))


class KernelFunction:
    """A kernel as a function of its tensors, with one copy of its modules per thread."""

    def __init__(self, kernel: kernels.Kernel, own_buffers: bool) -> None:
        self._kernel, self._own_buffers = kernel, own_buffers
        self._copies = threading.local()
        # Other threads wait for the first call, which may draw random numbers.
        self._first_call, self._was_called = threading.RLock(), False

    def __call__(self, tensors: dict[str, Tensor], x1: Tensor, x2: Tensor, *, diag: bool = False) -> Tensor:
        """The dense k(x1, x2), or its diagonal, for named tensors."""
        if not hasattr(self._copies, "module"):
            own = ("_parameters", "_buffers") if self._own_buffers else ("_parameters",)
            self._copies.module = _Forward(eager_copy(self._kernel, own))
        named = {f"kernel.{name}": tensor for name, tensor in tensors.items()}
        with _settings(self._kernel), nullcontext() if self._was_called else self._first_call:
            values = functional_call(self._copies.module, named, (x1, x2, diag))
            self._was_called = True
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return KernelFunction, (self._kernel, self._own_buffers)  # copies get their own modules


def shortest_lengthscales(kernel: kernels.Kernel, inputs: Tensor) -> Tensor:
    """The shortest lengthscale [d] of each dimension; 1 without one."""
    size = inputs.shape[-1]
    found = torch.full((size,), torch.inf, dtype=torch.float64, device=inputs.device)
    for part in kernel.modules():
        if isinstance(part, kernels.Kernel) and part.has_lengthscale:
            # The whole kernel's active dims are already selected.
            dims = part.active_dims
            if part is kernel or dims is None:
                dims = torch.arange(size, device=found.device)
            lengthscale = part.lengthscale.detach().flatten(0, -2).amin(0).to(found)
            # A kernel's own `forward` may give other inputs to a part, as BoTorch's LinearTruncatedFidelityKernel does.
            if len(dims) and dims.max() < size and len(lengthscale) in (1, len(dims)):
                found[dims] = torch.minimum(found[dims], lengthscale)
    return torch.where(torch.isfinite(found), found, 1.0)


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """A tensor's leaves that require a gradient."""
    nodes, seen, leaves = [tensor.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)  # pyright: ignore[reportAttributeAccessIssue]
        nodes += [following for following, _ in node.next_functions]
    return leaves

"""Any GPyTorch kernel as a matrix that is never stored: tiles from the kernel's own code, derivatives by autograd.

The kernel is called as a function of explicit tensors, inputs and parameters, so that each tile can be evaluated and
differentiated by itself; the user's kernel is never changed, not even when its code raises.
"""

import weakref
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import Kernel
from linear_operator import LinearOperator, to_dense
from torch import Tensor
from torch.func import functional_call

from gpy_iterative.linear_operators.products import KernelProducts, LoweredProducts
from gpy_iterative.linear_operators.tile_cache import TileCache
from gpy_iterative.linear_operators.tile_weights import TileWeights
from gpy_iterative.linear_operators.tiled import TiledLinearOperator
from gpy_iterative.linear_operators.tiles import Tiles, blocks

#: Points of a block of which only the diagonal is wanted: kernels with several outputs have no cheaper way.
DIAGONAL_BLOCK = 256


class _KernelFunction(torch.nn.Module):
    """Holds the kernel under a name, and calls its `forward` on inputs whose active dims are already selected."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False) -> Tensor:
        # gpytorch.Module.__call__, not the kernel's own: active dims are selected once, by the caller.
        # Dense blocks are wanted: GPyTorch's KeOps kernels would compile several programs to make them.
        with gpytorch.settings.lazily_evaluate_kernels(False), gpytorch.settings.use_keops(False):
            return to_dense(gpytorch.Module.__call__(self.kernel, x1, x2, diag=diag))


class KernelTiles(Tiles):
    """k(x1_i, x2_j) in tiles; `outputs` rows of the matrix belong to each input."""

    def __init__(self, operator: "GenericKernelLinearOperator", outputs: int) -> None:
        # Not kept alive by its own tiles: their memory would wait for the garbage collector.
        self._operator, self._outputs = weakref.proxy(operator), outputs
        length = max(operator.products.tile_rows(operator.x1.device) // outputs, 1)
        self.input_rows = blocks(operator.x1.shape[-2], length)
        self.input_columns = blocks(operator.columns.shape[-2], length)
        super().__init__(
            operator.shape,
            symmetric=operator.symmetric,
            rows=[self._scaled(part) for part in self.input_rows],
            columns=[self._scaled(part) for part in self.input_columns],
            owner=operator.representation(),
            products=operator.products,
            cache=operator.cache,
        )

    def evaluate(self, i: int, columns: range, out: Tensor) -> Tensor:
        with torch.no_grad():
            x1 = self._operator.x1[..., self.input_rows[i], :]
            # The same object on the diagonal: kernels recognise it and keep distances of exactly zero.
            on_diagonal = self.symmetric and i == columns[0]
            x2 = x1 if on_diagonal else self._operator.columns[..., self.input_span(columns), :]
            values = self._operator.evaluate(x1, x2)
            return out.copy_(values.unflatten(-1, (len(columns), -1)).transpose(-3, -2))

    def input_span(self, columns: range) -> slice:
        """The inputs of a strip's columns."""
        return slice(self.input_columns[columns[0]].start, self.input_columns[columns[-1]].stop)

    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        with torch.no_grad():
            if self._outputs > 1:
                return self._block_of_outputs(rows, columns)
            x1, x2 = self._operator.x1[..., rows, :], self._operator.columns[..., columns, :]
            return self._operator.evaluate(x1, x2).expand(*self.shape[:-2], -1, -1).clone()

    def _block_of_outputs(self, rows: slice | Tensor, columns: slice) -> Tensor:
        """Rows of one input belong together, as columns do: whole inputs are evaluated, and entries picked from them."""
        operator, outputs = self._operator, self._outputs
        if isinstance(rows, slice):
            rows = torch.arange(self.shape[-2], device=operator.device)[rows]
        inputs, position = (rows // outputs).unique(return_inverse=True)
        start, stop, _ = columns.indices(self.shape[-1])
        first = start // outputs
        values = operator.evaluate(operator.x1[..., inputs, :], operator.columns[..., first : -(-stop // outputs), :])
        values = values[..., position * outputs + rows % outputs, :]
        return values[..., start - first * outputs : stop - first * outputs].clone()

    def _scaled(self, part: slice) -> slice:
        return slice(part.start * self._outputs, part.stop * self._outputs)


class GenericKernelLinearOperator(TiledLinearOperator):
    """k(x1, x2) for any kernel.

    Args:
        x1: inputs [*b, n, d], reduced to the kernel's active dims.
        parameters: the kernel's parameters, in the order of `names`; gradients flow to these tensors.
        x2: inputs [*b, m, d]; None makes the operator symmetric.
        kernel: called as a function; its own parameters are not used.
        names: the parameters' names, `[name for name, _ in kernel.named_parameters()]`.
        products: how products are computed.
        cache: shared by all rebuilds of the operator; None starts an empty one.
        members: indices of batch dimensions, one applied after the other: the operator is these members of the batch.

    A product costs one evaluation of the kernel the first time and n m s multiply-adds once its tiles are kept; the
    derivative one further evaluation with autograd, a tile at a time. Memory is a few tiles and the tile cache. A member
    of a batch costs the evaluation of the whole batch: which part of a kernel's parameters belongs to it, only the kernel
    knows.

    Raises:
        ValueError: the backend is "keops", which knows only radial kernels.
    """

    def __init__(
        self,
        x1: Tensor,
        *parameters: Tensor,
        x2: Tensor | None = None,
        kernel: Kernel,
        names: tuple[str, ...],
        products: KernelProducts | None = None,
        cache: TileCache | None = None,
        members: tuple[tuple[Any, ...], ...] = (),
    ) -> None:
        products = KernelProducts() if products is None else products
        if products.backend == "keops":
            raise ValueError(
                f"{type(kernel).__name__} has no KeOps formula: use KernelProducts(backend='auto'), which evaluates any "
                "kernel in tiles. KeOps serves RBF, Matern and RQ kernels, their scales and their sums."
            )
        cache = TileCache() if cache is None else cache
        tensors = {} if x2 is None else {"x2": x2}
        options = {"kernel": kernel, "names": names, "products": products, "cache": cache, "members": members}
        super().__init__(x1, *parameters, **tensors, **options)
        self.x1, self.x2, self.parameters = x1, x2, parameters
        self.kernel, self.names, self.products, self.cache, self.members = kernel, names, products, cache, members
        self._function = _KernelFunction(kernel)
        is_lowered = isinstance(products, LoweredProducts)
        self._converted_buffers = _floating_buffers(kernel, x1.dtype) if is_lowered else {}

    @classmethod
    def of_kernel(
        cls,
        kernel: Kernel,
        x1: Tensor,
        x2: Tensor | None = None,
        *,
        products: KernelProducts | None = None,
        cache: TileCache | None = None,
    ) -> "GenericKernelLinearOperator":
        """The operator of a kernel's own parameters.

        Each call has tensors of its own, so that no tiles of an earlier one are taken for its: GPyTorch sets parameters
        through `.data`, which their versions do not tell.
        """
        named = {name: parameter.clone() for name, parameter in kernel.named_parameters()}
        x1 = x1.view_as(x1)
        return cls(x1, *named.values(), x2=x2, kernel=kernel, names=tuple(named), products=products, cache=cache)

    @property
    def symmetric(self) -> bool:
        """Whether rows and columns are the same points."""
        return self.x2 is None

    @property
    def columns(self) -> Tensor:
        """The inputs of the columns."""
        return self.x1 if self.x2 is None else self.x2

    @property
    def tile_scale(self) -> Tensor:
        """1: a kernel's tiles carry its outputscale."""
        return self.x1.new_ones(())

    def evaluate(self, x1: Tensor, x2: Tensor, parameters: tuple[Tensor, ...] | None = None) -> Tensor:
        """The dense k(x1, x2), differentiable in inputs and parameters."""
        parameters = self.parameters if parameters is None else parameters
        # What a kernel makes of float32 inputs may be float64, by tensors of its own.
        values = functional_call(self._function, self._named(parameters), (x1, x2)).to(x1.dtype)
        return self._of_members(values.expand(*self._whole_batch(), *values.shape[-2:])) if self.members else values

    def _whole_batch(self) -> torch.Size:
        """The batch shape of the kernel on these inputs, before any members are picked."""
        return torch.broadcast_shapes(self.x1.shape[:-2], self.columns.shape[:-2], self.kernel.batch_shape)

    def _of_members(self, values: Tensor) -> Tensor:
        for index in self.members:
            values = values[index]
        return values

    def _named(self, parameters: tuple[Tensor, ...]) -> dict[str, Tensor]:
        named = {f"kernel.{name}": tensor for name, tensor in zip(self.names, parameters, strict=True)}
        return named | self._converted_buffers

    def _make_lowered(self, products: LoweredProducts) -> "GenericKernelLinearOperator":
        """The twin, whose kernel is tried on one pair of inputs: what float32 cannot compute is refused before work."""
        lowered = super()._make_lowered(products)
        assert isinstance(lowered, GenericKernelLinearOperator)
        try:
            with torch.no_grad():
                lowered.evaluate(lowered.x1[..., :1, :], lowered.columns[..., :1, :])
        except RuntimeError as error:
            raise ValueError(
                f"{type(self.kernel).__name__} cannot be computed in float32, as precision={products.precision!r} asks "
                "for: leave 'native'. Where the kernel is your own, register its tensors as buffers (register_buffer), and "
                f"let it take dtypes from its inputs. What torch says: {error}"
            ) from error
        return lowered

    def _outputs(self) -> int:
        return self.kernel.num_outputs_per_input(self.x1, self.columns)

    def _make_tiles(self) -> Tiles:
        return KernelTiles(self, self._outputs())

    def _size(self) -> torch.Size:
        outputs, columns = self._outputs(), self.columns
        batch = self._whole_batch()
        if self.members:
            batch = self._of_members(self.x1.new_empty(()).expand(batch)).shape
        return torch.Size((*batch, self.x1.shape[-2] * outputs, columns.shape[-2] * outputs))

    def _rebuild(
        self, x1: Tensor, x2: Tensor | None, members: tuple[tuple[Any, ...], ...] | None = None
    ) -> LinearOperator:
        return type(self)(
            x1,
            *self.parameters,
            x2=x2,
            kernel=self.kernel,
            names=self.names,
            products=self.products,
            members=self.members if members is None else members,
        )

    def _differentiable_matmul(self, rhs: Tensor) -> Tensor:
        return self.evaluate(self.x1, self.columns) @ rhs

    def _tile_derivatives(self, weights: TileWeights) -> tuple[Tensor | None, ...]:
        tensors = self.representation()
        wanted = [tensor.requires_grad for tensor in tensors]
        if not any(wanted):
            return (None,) * len(tensors)
        gradients = [torch.zeros_like(tensor) for tensor in tensors]
        tiles = self.tiles()
        assert isinstance(tiles, KernelTiles)
        for i in range(len(tiles.rows)):
            for columns in tiles.strips[i]:
                weight = weights.strip(i, columns).transpose(-3, -2).flatten(-2)
                self._add_derivative(gradients, wanted, tiles.input_rows[i], tiles.input_span(columns), weight)
        tiles.complete(
            [gradient for gradient, is_wanted in zip(gradients, wanted, strict=True) if is_wanted], weights.tensors
        )
        return tuple(gradient if is_wanted else None for gradient, is_wanted in zip(gradients, wanted, strict=True))

    def _add_derivative(
        self, gradients: list[Tensor], wanted: list[bool], rows: slice, columns: slice, weights: Tensor
    ) -> None:
        """Adds the derivative of sum(weights * block) with respect to inputs and parameters."""
        with torch.enable_grad():
            inputs_wanted = wanted[0] or (self.x2 is not None and wanted[-1])
            x1 = self.x1.detach()[..., rows, :].requires_grad_(inputs_wanted)
            same = self.symmetric and rows == columns
            x2 = x1 if same else self.columns.detach()[..., columns, :].requires_grad_(inputs_wanted)
            parameters = tuple(p.detach().requires_grad_(p.requires_grad) for p in self.parameters)
            block = self.evaluate(x1, x2, parameters)
            leaves = [t for t in ((x1,) if same else (x1, x2)) + parameters if t.requires_grad]
            if not block.requires_grad:
                return
            found = torch.autograd.grad((block * weights).sum(), leaves, allow_unused=True)
        derivative = dict(zip(map(id, leaves), found, strict=True))
        targets: list[tuple[Tensor, Tensor]] = [(gradients[0][..., rows, :], x1)]
        if not same:
            other = gradients[0] if self.symmetric else gradients[-1]
            targets.append((other[..., columns, :], x2))
        targets += zip(gradients[1 : 1 + len(parameters)], parameters, strict=True)
        for gradient, leaf in targets:
            part = derivative.get(id(leaf))
            if part is not None:
                gradient += part

    def _diagonal(self) -> Tensor:
        if not self.symmetric:
            blocks_on_it = zip(self.x1.split(DIAGONAL_BLOCK, -2), self.columns.split(DIAGONAL_BLOCK, -2), strict=True)
            parts = [self._rebuild(left, right).to_dense() for left, right in blocks_on_it]
            return torch.cat([part.diagonal(dim1=-2, dim2=-1) for part in parts], dim=-1)
        named = self._named(self.parameters)
        diagonal = functional_call(self._function, named, (self.x1, self.x1), {"diag": True}).to(self.x1.dtype)
        whole = torch.Size((*self._whole_batch(), self.shape[-1]))
        if diagonal.shape != whole:
            if diagonal.shape[-2:] == self.shape[-2:]:  # a kernel that overlooks `diag`
                diagonal = diagonal.diagonal(dim1=-2, dim2=-1)
            diagonal = diagonal.expand(whole)
        return self._of_members(diagonal)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        outputs = self._outputs()
        if not all(isinstance(index, slice) and index == slice(None) for index in batch_indices):
            picked = self._rebuild(self.x1, self.x2, (*self.members, batch_indices))
            return picked._getitem(row_index, col_index, *[slice(None)] * len(picked.batch_shape))
        rows = _input_index(row_index, outputs, self.shape[-2])
        columns = _input_index(col_index, outputs, self.shape[-1])
        if rows is None or columns is None:
            return super()._getitem(row_index, col_index, *batch_indices)
        principal = self.symmetric and isinstance(rows, slice) and isinstance(columns, slice) and rows == columns
        return self._rebuild(self.x1[..., rows, :], None if principal else self.columns[..., columns, :])

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        # One by one, as a batch of matrices with one point each; the first dimension is theirs.
        outputs, shape, whole = self._outputs(), row_index.shape, self._whole_batch()
        rows, columns = row_index.reshape(-1), col_index.reshape(-1)
        x1, x2 = (
            x.expand(*whole, *x.shape[-2:])[..., index // outputs, :].movedim(-2, 0).unsqueeze(-2)
            for x, index in ((self.x1, rows), (self.columns, columns))
        )
        values = functional_call(self._function, self._named(self.parameters), (x1, x2)).to(self.x1.dtype)
        values = values.expand(len(rows), *whole, outputs, outputs).movedim(0, -3)
        batch = tuple(index.reshape(-1) for index in batch_indices)
        pairs = torch.arange(len(rows), device=rows.device)
        values = self._of_members(values)[(*batch, pairs, rows % outputs, columns % outputs)]
        return values.reshape(shape)

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else self._rebuild(self.columns, self.x1)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        if self.members or len(batch_shape) < len(self.kernel.batch_shape):
            return super()._expand_batch(batch_shape)
        expand = lambda x: x.expand(*batch_shape, *x.shape[-2:])
        return self._rebuild(expand(self.x1), None if self.x2 is None else expand(self.x2))

    def to_dense(self) -> Tensor:
        """The matrix [*b, n, m]; O(n m) memory, differentiable."""
        return self.evaluate(self.x1, self.columns).expand(self.shape)


def _floating_buffers(kernel: Kernel, dtype: torch.dtype) -> dict[str, Tensor]:
    return {f"kernel.{name}": buffer.to(dtype) for name, buffer in kernel.named_buffers() if buffer.is_floating_point()}


def _input_index(index: Any, outputs: int, size: int) -> Any:
    """The index of inputs for an index of matrix rows; None where it does not pick whole inputs."""
    if outputs == 1:
        return index
    if not isinstance(index, slice):
        return None
    start, stop, step = index.indices(size)
    if step != 1 or start % outputs or stop % outputs:
        return None
    return slice(start // outputs, stop // outputs)

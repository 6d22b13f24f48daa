"""Any GPyTorch kernel as a matrix that is never stored."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gpytorch.kernels import GridInterpolationKernel, Kernel
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators.extensions import is_principal, points_of, rebuilt, whole_points
from gpy_iterative.linear_operators.kernel_functions import KernelFunction, leaves_of, shortest_lengthscales
from gpy_iterative.linear_operators.module_copies import ModuleCopies
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.tiles.cache import Tile, TileCache
from gpy_iterative.linear_operators.tiles.operator import TiledLinearOperator, TileWeights, viewed
from gpy_iterative.linear_operators.tiles.tiles import Tiles, blocks

#: Points of a block whose diagonal is wanted; most entries evaluated for a wanted one.
DIAGONAL_BLOCK = 256
SAME_ENTRIES = {"rtol": 1e-3, "atol": 1e-6}


class GenericKernelLinearOperator(TiledLinearOperator):
    """k(x1, x2) for any kernel, called as a function of inputs and parameters.

    Args:
        x1: inputs [*b, n, d], reduced to the kernel's active dims.
        tensors: the kernel's parameters by `names`, then those of `leaves`; all get gradients.
        x2: inputs [*b, m, d]; None makes the operator symmetric.
        kernel: its own parameters are not used.
        names: of `kernel.named_parameters()`.
        cache: where tiles are kept.
        members: steps that change the kernel's batch: an index picks members, a torch.Size expands it.
        leaves: other tensors that the kernel uses.
        dtype: of the matrix and, if given, of buffers; None is that of inputs or parameters.

    The kernel is called without additional batch dimensions, which many kernels do not support; a batch member costs as
    much as the whole batch. A product costs one evaluation, or n m s multiply-adds of kept tiles; the derivative costs
    one evaluation with autograd.

    Raises:
        ValueError: the backend is "keops"; when tiles are evaluated, the kernel returns a wrong shape.
    """

    def __init__(
        self,
        x1: Tensor,
        *tensors: Tensor,
        x2: Tensor | None = None,
        kernel: Kernel,
        names: tuple[str, ...],
        products: KernelProducts | None = None,
        cache: TileCache | None = None,
        members: tuple[tuple[Any, ...], ...] = (),
        leaves: tuple[Tensor, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        products = KernelProducts() if products is None else products
        if products.backend == "keops":
            raise ValueError(
                f"{type(kernel).__name__} has no KeOps formula: use KernelProducts(backend='auto'), which evaluates any "
                "kernel in tiles. KeOps serves RBF, Matern, RQ and periodic kernels, their scales and their sums."
            )
        cache = TileCache() if cache is None else cache
        options = {"kernel": kernel, "names": names, "products": products, "cache": cache, "members": members}
        super().__init__(x1, *tensors, **({} if x2 is None else {"x2": x2}), **options, leaves=leaves, dtype=dtype)
        self.x1, self.x2, self.parameters = x1, x2, tensors[: len(names)]
        self.kernel, self.names, self.products, self.cache, self.members = kernel, names, products, cache, members
        self._leaves = leaves
        own = next((tensor.dtype for tensor in (x1, *self.parameters) if tensor.is_floating_point()), None)
        self._dtype = dtype or own or kernel.dtype
        buffers = () if dtype is None else kernel.named_buffers()
        self._buffers = {name: buffer.to(own or dtype) for name, buffer in buffers if buffer.is_floating_point()}
        self._function = KernelFunction(kernel, own_buffers=dtype is not None)
        self.symmetric, self.columns = x2 is None, x1 if x2 is None else x2
        self.tile_scale = x1.new_ones((), dtype=self._dtype)  # tiles carry the outputscale
        self._outputs = kernel.num_outputs_per_input(x1, self.columns)

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

        Parameters are copied: GPyTorch sets them through `.data`, which does not change the version by which caches notice
        changes.

        Raises:
            ValueError: the kernel contains a GridInterpolationKernel whose grid follows its inputs.
        """
        if any(isinstance(part, GridInterpolationKernel) and part.grid_is_dynamic for part in kernel.modules()):
            raise ValueError(
                f"{type(kernel).__name__} is evaluated in blocks, and the GridInterpolationKernel inside of it would have "
                "another grid for each: give that kernel grid_bounds= that hold all inputs."
            )
        kernel = ModuleCopies().of(kernel)
        named = {name: parameter.clone() for name, parameter in kernel.named_parameters()}
        x1 = x1.view_as(x1)
        operator = cls(x1, *named.values(), x2=x2, kernel=kernel, names=tuple(named), products=products, cache=cache)
        leaves = operator._other_leaves()
        if not leaves:
            return operator
        return cls(*operator._args, *leaves, **operator._kwargs | {"leaves": leaves})

    def _other_leaves(self) -> tuple[Tensor, ...]:
        """Other leaves, such as tensors in a closure."""
        rows, columns = (x.detach()[..., :2, :] for x in (self.x1, self.columns))
        if not torch.is_grad_enabled() or not (rows.numel() and columns.numel()):
            return ()
        own = tuple(parameter.detach().requires_grad_(parameter.requires_grad) for parameter in self.parameters)
        known = set(map(id, own))
        block = self.evaluate(rows, rows if self.symmetric else columns, own)
        return tuple(leaf for leaf in leaves_of(block) if id(leaf) not in known)

    @property
    def dtype(self) -> torch.dtype | None:
        """See the argument `dtype`."""
        return self._dtype

    def evaluate(self, x1: Tensor, x2: Tensor, parameters: tuple[Tensor, ...] | None = None) -> Tensor:
        """k(x1, x2) [*b, n, m], differentiable."""
        parameters = self.parameters if parameters is None else parameters
        try:
            # A kernel's own float64 tensors turn float32 into float64.
            values = self._function(self._named(parameters), x1, x2).to(self.dtype)
        except RuntimeError as error:
            if x1.shape[-2] != x2.shape[-2]:  # such as GPyTorch's RBFKernelGradGrad
                error.add_note(
                    f"{type(self.kernel).__name__} was called with {x1.shape[-2]} and {x2.shape[-2]} inputs. Predictions "
                    "and iterative solvers need kernels that take different numbers of inputs."
                )
            raise
        if values.shape[-2:] != (x1.shape[-2] * self._outputs, x2.shape[-2] * self._outputs):
            raise ValueError(
                f"{type(self.kernel).__name__} has a matrix of shape {tuple(values.shape)} for {x1.shape[-2]} and "
                f"{x2.shape[-2]} inputs: its forward must return a row for each input of x1 and a column for each of x2."
            )
        return self._of_members(values.expand(*self._whole_batch(), *values.shape[-2:]), values.shape[-2:])

    def _whole_batch(self) -> torch.Size:
        return torch.broadcast_shapes(self.x1.shape[:-2], self.columns.shape[:-2], self.kernel.batch_shape)

    def _of_members(self, values: Tensor, event_shape: torch.Size) -> Tensor:
        for step in self.members:
            values = values.expand((*step, *event_shape)) if isinstance(step, torch.Size) else values[step]
        return values

    def _named(self, parameters: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self.names, parameters, strict=True)) | self._buffers

    def low_precision_copy(self) -> LinearOperator:
        """See `extensions.low_precision_copy`; tested on one pair of inputs."""
        copy = _with_dtype(super().low_precision_copy(), torch.float32)
        error = copy._error()
        if error is None:
            return copy
        raise ValueError(
            f"{type(self.kernel).__name__} cannot be computed in float32, as precision='float32' asks for: use "
            "precision='native', or in a kernel of your own use register_buffer and the inputs' dtype. "
            f"PyTorch's error: {error}"
        ) from error

    def in_float64(self, *, keeps_tiles: bool = True) -> LinearOperator:
        """See `extensions.in_float64`; tested on one pair of inputs."""
        self._error()  # RFFKernel draws frequencies at its first call, which the copy must share
        copy = _with_dtype(super().in_float64(keeps_tiles=keeps_tiles), torch.float64)
        if copy._error() is None:
            return copy
        return _with_dtype(rebuilt(self, viewed), torch.float64, **self._of_new_tiles(keeps_tiles))

    @torch.no_grad()
    def _error(self) -> RuntimeError | None:
        try:
            self.evaluate(self.x1[..., :1, :], self.columns[..., :1, :])
        except RuntimeError as error:
            return error
        return None

    def _make_tiles(self) -> Tiles:
        return KernelTiles(self)

    def _size(self) -> torch.Size:
        outputs, columns = self._outputs, self.columns
        batch = self._of_members(self.x1.new_empty(()).expand(self._whole_batch()), torch.Size()).shape
        return torch.Size((*batch, self.x1.shape[-2] * outputs, columns.shape[-2] * outputs))

    def _rebuild(self, x1: Tensor, x2: Tensor | None, *steps: tuple[Any, ...]) -> LinearOperator:
        changes = {"x2": x2, "cache": None, "members": (*self.members, *steps)}
        return type(self)(x1, *self._args[1:], **self._kwargs | changes)

    def _differentiable_matmul(self, rhs: Tensor) -> Tensor:
        return self.evaluate(self.x1, self.columns) @ rhs

    def _differentiable_derivatives(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        if self._leaves:
            raise NotImplementedError(
                f"There are no second derivatives of a {type(self.kernel).__name__} that uses tensors which require a "
                "gradient and are not its own parameters: register them, as parameters or in modules of the kernel."
            )
        return super()._differentiable_derivatives(left_vecs, right_vecs)

    def _tile_derivatives(self, weights: TileWeights) -> tuple[Tensor | None, ...]:
        tensors = self.representation()
        wanted = [tensor.requires_grad for tensor in tensors]
        if not any(wanted):
            return (None,) * len(tensors)
        tiles = self.tiles()
        assert isinstance(tiles, KernelTiles)
        sums = tiles.sums(partial(self._share_of_derivative, weights, wanted, tiles), tiles.visits())
        gradients = [gradient if is_wanted else None for gradient, is_wanted in zip(sums, wanted, strict=True)]
        tiles.complete([gradient for gradient in gradients if gradient is not None], weights.tensors)
        return tuple(gradients)

    def _share_of_derivative(
        self, weights: TileWeights, wanted: list[bool], tiles: "KernelTiles", visits: Sequence[Tile]
    ) -> list[Tensor]:
        found = [torch.zeros_like(tensor) for tensor in self.representation()]
        for tile in visits:
            i, j = tile.key
            self._add_derivative(found, wanted, tiles.input_rows[i], tiles.input_columns[j], weights.at(tile))
        return found

    def _add_derivative(
        self, gradients: list[Tensor], wanted: list[bool], rows: slice, columns: slice, weights: Tensor
    ) -> None:
        with torch.enable_grad():
            inputs_wanted = wanted[0] or (self.x2 is not None and wanted[-1])
            x1 = self.x1.detach()[..., rows, :].requires_grad_(inputs_wanted)
            same = self.symmetric and rows == columns
            x2 = x1 if same else self.columns.detach()[..., columns, :].requires_grad_(inputs_wanted)
            parameters = tuple(p.detach().requires_grad_(p.requires_grad) for p in self.parameters)
            targets = [(gradients[0][..., rows, :], x1), *zip(gradients[1:], parameters + self._leaves, strict=False)]
            if not same:
                targets.append(((gradients[0] if self.symmetric else gradients[-1])[..., columns, :], x2))
            targets = [(gradient, leaf) for gradient, leaf in targets if leaf.requires_grad]
            block = self.evaluate(x1, x2, parameters)
            if not block.requires_grad:
                return
            # All tiles share the graph of `leaves`.
            leaves, is_kept = [leaf for _, leaf in targets], bool(self._leaves)
            found = torch.autograd.grad((block * weights).sum(), leaves, allow_unused=True, retain_graph=is_kept)
        for (gradient, _), part in zip(targets, found, strict=True):
            if part is not None:
                gradient += part

    def _diagonal(self) -> Tensor:
        if not self.symmetric:
            blocks_on_it = zip(self.x1.split(DIAGONAL_BLOCK, -2), self.columns.split(DIAGONAL_BLOCK, -2), strict=True)
            parts = [self._rebuild(left, right).to_dense() for left, right in blocks_on_it]
            return torch.cat([part.diagonal(dim1=-2, dim2=-1) for part in parts], dim=-1)
        # In parts: some kernels compute the whole matrix for its diagonal.
        parts = self.x1.split(self.products.tile_rows(self.x1.device), -2)
        return torch.cat([self._diagonal_at(x) for x in parts], dim=-1)

    def _diagonal_at(self, x: Tensor) -> Tensor:
        size = x.shape[-2] * self._outputs
        diagonal = self._function(self._named(self.parameters), x, x, diag=True).to(self.dtype)
        whole = torch.Size((*self._whole_batch(), size))
        if diagonal.shape != whole:
            if diagonal.shape[-2:] == (size, size):  # the kernel ignores `diag`
                diagonal = diagonal.diagonal(dim1=-2, dim2=-1)
            try:
                diagonal = diagonal.expand(whole)
            except RuntimeError as error:
                raise ValueError(
                    f"{type(self.kernel).__name__} has a diagonal of shape {tuple(diagonal.shape)} for {x.shape[-2]} "
                    "inputs: with diag=True its forward must return one entry for each."
                ) from error
        return self._of_members(diagonal, whole[-1:])

    def principal_blocks(self, rows: Tensor) -> Tensor:
        """See `extensions.principal_blocks`; one kernel call, if it gives two blocks as two calls do."""
        if self._outputs > 1 or self.members:
            size = rows.shape[-1]
            parts = [self._entries(block.repeat_interleave(size), block.repeat(size)) for block in rows]
            return torch.stack(parts).view(*rows.shape, size)
        points = self.x1[rows]
        if len(rows) > 2:
            one_by_one = torch.stack([self.evaluate(x, x) for x in points[:2]])
            found = self._in_one_batch(points[:2])
            if found is not None and torch.allclose(found, one_by_one, **SAME_ENTRIES):
                return self._function(self._named(self.parameters), points, points).to(self.dtype)
        return torch.stack([self.evaluate(x, x) for x in points]).clone()

    def _in_one_batch(self, points: Tensor) -> Tensor | None:
        try:
            values = self._function(self._named(self.parameters), points, points).to(self.dtype)
        except (RuntimeError, ValueError, IndexError):
            return None
        return values if values.shape == (*points.shape[:-1], points.shape[-2]) else None

    def kernel_inputs(self) -> Tensor:
        """See `extensions.kernel_inputs`; each dimension is over its shortest lengthscale."""
        inputs = self.x1.detach() / shortest_lengthscales(self.kernel, self.x1.detach())
        inputs = inputs.repeat_interleave(self._outputs, dim=-2)
        if not self.members:
            return inputs
        return self._of_members(inputs.expand(*self._whole_batch(), *inputs.shape[-2:]), inputs.shape[-2:])

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        outputs = self._outputs
        if not all(isinstance(index, slice) and index == slice(None) for index in batch_indices):
            picked = self._rebuild(self.x1, self.x2, batch_indices)
            return picked._getitem(row_index, col_index, *[slice(None)] * len(picked.batch_shape))
        rows = whole_points(row_index, outputs, self.shape[-2])
        columns = whole_points(col_index, outputs, self.shape[-1])
        if rows is None or columns is None:
            return super()._getitem(row_index, col_index, *batch_indices)
        x2 = None if self.symmetric and is_principal(rows, columns) else self.columns[..., columns, :]
        return self._rebuild(self.x1[..., rows, :], x2)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        rows, columns, *batch = (index.reshape(-1) for index in (row_index, col_index, *batch_indices))
        return self._entries(rows, columns, *batch).reshape(row_index.shape)

    def _entries(self, rows: Tensor, columns: Tensor, *batch: Tensor) -> Tensor:
        """Entries [p] from a block, in halves if it has many others."""
        outputs = self._outputs
        row_points, i, row_outputs = points_of(rows, outputs)
        column_points, j, column_outputs = points_of(columns, outputs)
        if len(row_points) * len(column_points) > DIAGONAL_BLOCK * max(len(rows), DIAGONAL_BLOCK):
            halves = zip(*(index.tensor_split(2) for index in (rows, columns, *batch)), strict=True)
            return torch.cat([self._entries(*half) for half in halves])
        block = self.evaluate(self.x1[..., row_points, :], self.columns[..., column_points, :])
        return block[(*batch, i * outputs + row_outputs, j * outputs + column_outputs)]

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else self._rebuild(self.columns, self.x1)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LinearOperator:
        return self._rebuild(self.x1, self.x2, torch.Size(batch_shape))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._rebuild(self.x1, self.x2, (*[slice(None)] * dim, None))

    def to_dense(self) -> Tensor:
        return self.evaluate(self.x1, self.columns)


def _with_dtype(operator: LinearOperator, dtype: torch.dtype, **changes: Any) -> GenericKernelLinearOperator:
    return GenericKernelLinearOperator(*operator._args, **operator._kwargs | {"dtype": dtype} | changes)


class KernelTiles(Tiles):
    """k(x1_i, x2_j) in tiles; each input has `outputs` rows."""

    def __init__(self, operator: GenericKernelLinearOperator) -> None:
        # A cycle of references would keep memory.
        self._operator, outputs = weakref.proxy(operator), operator._outputs
        length = max(operator.products.tile_rows(operator.x1.device) // outputs, 1)
        self.input_rows = blocks(operator.x1.shape[-2], length)
        self.input_columns = blocks(operator.columns.shape[-2], length)
        super().__init__(
            operator.shape,
            symmetric=operator.symmetric,
            length=length * outputs,
            owner=operator.representation(),
            like=operator.tile_scale,
            products=operator.products,
            cache=operator.cache,
        )

    @torch.no_grad()
    def evaluate(self, tile: Tile, out: Tensor) -> Tensor:
        i, j = tile.key
        x1 = self._operator.x1[..., self.input_rows[i], :]
        # The same object: kernels then set distances on the diagonal to zero.
        x2 = x1 if self.symmetric and i == j else self._operator.columns[..., self.input_columns[j], :]
        return out.copy_(self._operator.evaluate(x1, x2))

    @torch.no_grad()
    def block(self, rows: slice | Tensor, columns: slice) -> Tensor:
        operator, outputs = self._operator, self._operator._outputs
        if outputs == 1:
            return operator.evaluate(operator.x1[..., rows, :], operator.columns[..., columns, :]).clone()
        if isinstance(rows, slice):
            rows = torch.arange(self.shape[-2], device=operator.device)[rows]
        inputs, position, output = points_of(rows, outputs)
        start, stop, _ = columns.indices(self.shape[-1])
        first = start // outputs
        values = operator.evaluate(operator.x1[..., inputs, :], operator.columns[..., first : -(-stop // outputs), :])
        values = values[..., position * outputs + output, :]
        return values[..., start - first * outputs : stop - first * outputs].clone()

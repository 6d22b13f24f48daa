"""Vecchia's approximation as a preconditioner.

Vecchia 1988; Schaefer et al. 2021 (arXiv 2004.14455: best factor of its sparsity); Gyger et al. 2024 (arXiv 2405.14492).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count, has_finite_sum
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.linear_operators.extensions import kernel_inputs, principal_blocks
from gpy_iterative.linear_operators.tiles.tiles import blocks
from gpy_iterative.preconditioners.neighbours import maximin_order, previous_neighbours
from gpy_iterative.preconditioners.pivoted_cholesky import NOT_FINITE
from gpy_iterative.preconditioners.preconditioner import PreconditionerRecipe
from gpy_iterative.preconditioners.sparse_inverse_cholesky import SparseInverseCholesky
from gpy_iterative.random_numbers import given_or_seeded, permutation
from gpy_iterative.worker_threads import ByDevice, run

#: Inputs up to which the maximin order is better than a random one; beyond, either may be, and it costs time.
MOST_INPUTS_OF_MAPS = 3
#: Entries of blocks factored at a time.
ENTRIES = ByDevice(cpu=2**16, accelerator=2**24)
#: Least jitter of an indefinite block, relative to its largest variance.
LEAST_JITTER = 1e-10


@dataclass(frozen=True)
class Vecchia(PreconditionerRecipe):
    """Recipe for H^-1 ~ B^T B, where row i of B is exact given the m nearest previous points.

    The order is maximin (early points far apart) up to three inputs, random beyond.

    Args:
        num_neighbours: m, at most n - 1 (B is then exact).
    """

    num_neighbours: int = 30

    def __post_init__(self) -> None:
        check_count("num_neighbours", self.num_neighbours)

    @torch.no_grad()
    def choices(self, operator: LinearOperator, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The order of elimination [n]."""
        generator = given_or_seeded(generator)
        points = _points(operator)
        is_map = points.shape[-1] <= MOST_INPUTS_OF_MAPS
        order = maximin_order(points, generator) if is_map else permutation(len(points), generator)
        return {"order": order.to(operator.device)}

    @torch.no_grad()
    def build(
        self,
        operator: LinearOperator,
        *,
        generator: torch.Generator | None = None,
        choices: Mapping[str, Tensor] | None = None,
    ) -> SparseInverseCholesky:
        """See `PreconditionerRecipe.build`.

        Cost: n searches for m neighbours, n m^2 kernel entries, n m^3 / 6 multiply-adds.

        Args:
            choices: of an earlier factor, for one that is smooth in the hyperparameters.

        Raises:
            ValueError: the system has no kernel inputs, or is a batch.
        """
        points = _points(operator)
        order = (self.choices(operator, generator) if choices is None else choices)["order"]
        count = max(min(self.num_neighbours, len(points) - 1), 1)
        neighbours = previous_neighbours(points[order], count).to(order.device)
        return SparseInverseCholesky(order, neighbours, *_rows(operator, order, neighbours))


def _points(operator: LinearOperator) -> Tensor:
    if operator.batch_shape:
        raise ValueError(
            f"Vecchia takes one system at a time, got a batch {tuple(operator.batch_shape)}: use RandomlyPivotedCholesky."
        )
    points = kernel_inputs(operator)
    if points is None:
        raise ValueError(
            "Vecchia needs the inputs of a kernel, to find neighbours, and this system has none: it is a "
            f"{type(operator).__name__}. Use RandomlyPivotedCholesky, which takes any matrix."
        )
    if not torch.isfinite(points).all():
        raise NonFiniteError("The kernel's inputs are not finite. Check the data and the hyperparameters.")
    return points


def _rows(operator: LinearOperator, order: Tensor, neighbours: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and diagonal of B."""
    size, count = neighbours.shape
    entries = torch.empty(size, count + 1, dtype=operator.dtype, device=operator.device)
    head = min(count, size)  # rows with all previous points as neighbours
    inverse = _inverse_factors(operator, order[:head].unsqueeze(0))[0]
    entries[:head] = 0
    entries[:head, :head] = inverse.tril(-1)
    entries[:head, -1] = inverse.diagonal()
    parts = blocks(size, max(ENTRIES.on(entries.device) // (count + 1) ** 2, 1), head)
    run([partial(_fill, entries, operator, order, neighbours, rows) for rows in parts], entries.device)
    return entries[:, :-1].contiguous(), entries[:, -1].contiguous()


def _fill(entries: Tensor, operator: LinearOperator, order: Tensor, neighbours: Tensor, rows: slice) -> None:
    """Row i of B: last row of the inverse factor of i and its neighbours."""
    own = torch.arange(rows.start, rows.stop, device=neighbours.device)
    sets = torch.cat([neighbours[rows], own.unsqueeze(-1)], dim=-1)
    entries[rows] = _inverse_factors(operator, order[sets], last_only=True)[:, 0].to(entries.dtype)


def _inverse_factors(operator: LinearOperator, sets: Tensor, *, last_only: bool = False) -> Tensor:
    """Inverse factors, or their last rows."""
    blocks = principal_blocks(operator, sets).double()
    identity = torch.eye(sets.shape[-1], dtype=blocks.dtype, device=blocks.device)[-1 if last_only else 0 :]
    wanted = identity.expand(len(sets), *identity.shape)
    return torch.linalg.solve_triangular(block_factors(blocks), wanted, upper=False, left=False)


def block_factors(blocks: Tensor) -> Tensor:
    """Cholesky factors [*b, k, k] of float64 blocks; of indefinite ones with jitter. Raises NonFiniteError."""
    if not has_finite_sum(blocks):
        raise NonFiniteError(NOT_FINITE)
    lower, info = torch.linalg.cholesky_ex(blocks)
    failed = info > 0
    if failed.any():
        jittered = blocks[failed]
        diagonal = jittered.diagonal(dim1=-2, dim2=-1)
        scale = diagonal.amax(-1)
        lowest = torch.linalg.eigvalsh(jittered)[..., 0]
        jitter = (-2 * lowest).clamp_min(0) + LEAST_JITTER * torch.where(scale > 0, scale, 1.0)
        diagonal.add_(jitter.unsqueeze(-1))
        lower[failed] = torch.linalg.cholesky(jittered)
    return lower

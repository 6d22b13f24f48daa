"""A solve and a log-determinant's quadrature share their passes over the kernel matrix."""

import pytest
import torch
from linear_operator import LinearOperator
from linear_operator.operators import DenseLinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.linear_solvers.logdet import lanczos
from gpy_iterative.linear_solvers.logdet.lanczos import LogDeterminantQuadrature, SharedProducts
from gpy_iterative.preconditioners import LowRankPlusDiagonal, PivotedCholesky
from gpy_iterative.solvers import AlternatingProjections, ConjugateGradients, Solver
from tests.linear_solvers.contract import right_hand_sides, system


class Counting(DenseLinearOperator):
    """Counts its products."""

    count = 0

    def _matmul(self, rhs: Tensor) -> Tensor:
        Counting.count += 1
        return super()._matmul(rhs)


@pytest.fixture(autouse=True)
def _no_products() -> None:
    Counting.count = 0


def counting_system(*batch: int) -> tuple[NoisyLinearOperator, LowRankPlusDiagonal, Tensor]:
    operator = system()
    kernel = Counting(operator.kernel.to_dense().expand(*batch, *operator.shape).clone())
    operator = NoisyLinearOperator(kernel, operator.noise.expand(kernel.shape[:-1]))
    factor = PivotedCholesky(rank=20).build(operator)
    generator = torch.Generator().manual_seed(0)
    shape = (*batch, factor.rank + len(system().noise), 4)
    signs = 2.0 * torch.randint(0, 2, shape, generator=generator).double() - 1
    return operator, factor, factor.sample(signs)[0]


def both(
    operator: LinearOperator,
    factor: LowRankPlusDiagonal,
    probes: Tensor,
    solver: Solver,
    *,
    is_shared: bool,
    **options: int,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Solutions, mean and error of the log-determinant, and the number of products."""
    Counting.count = 0
    quadrature = LogDeterminantQuadrature(operator, probes, factor, **options)
    rhs = right_hand_sides().expand(*operator.batch_shape, -1, -1)
    shared = SharedProducts.of(operator, quadrature) if is_shared else operator
    solution = solver.solve(shared, rhs, preconditioner=factor)
    found = quadrature.finished()
    return solution.value, found.mean, found.sem, Counting.count


@pytest.mark.parametrize("most", [3, 200])
def test_one_pass_serves_both(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the solve ends first: the quadrature then makes the missing products."""
    monkeypatch.setattr(lanczos, "WORTH_OF_ERROR", 0.0)
    monkeypatch.setattr(lanczos, "RESOLUTION", 1e-9)
    operator, factor, probes = counting_system()
    solver = ConjugateGradients(tolerance=0.1)
    options = {"max_iterations": most}
    Counting.count = 0
    alone = LogDeterminantQuadrature(operator, probes, factor, **options).finished()
    of_quadrature = Counting.count
    separate = both(operator, factor, probes, solver, is_shared=False, **options)
    shared = both(operator, factor, probes, solver, is_shared=True, **options)
    of_solve = separate[-1] - of_quadrature
    assert (of_quadrature > of_solve) is (most == 200)
    assert shared[-1] == max(of_solve, of_quadrature)
    for found, expected in zip(shared[:-1], separate[:-1], strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(shared[1], alone.mean)


def test_without_whole_products_or_in_a_batch_each_makes_its_own() -> None:
    operator, factor, probes = counting_system(2)
    separate, shared = (both(operator, factor, probes, ConjugateGradients(), is_shared=flag) for flag in (False, True))
    assert shared[-1] == separate[-1]
    for found, expected in zip(shared[:-1], separate[:-1], strict=True):
        torch.testing.assert_close(found, expected)
    operator, factor, probes = counting_system()
    by_blocks = AlternatingProjections(block_size=20)
    separate, shared = (both(operator, factor, probes, by_blocks, is_shared=flag) for flag in (False, True))
    torch.testing.assert_close(shared[1], separate[1])
    torch.testing.assert_close(shared[0], separate[0])


def test_copies_are_plain() -> None:
    operator, factor, probes = counting_system()
    quadrature = LogDeterminantQuadrature(operator, probes, factor)
    shared = SharedProducts.of(operator, quadrature)
    before = quadrature.wanted
    for copied in (shared.clone(), shared[:100, :100], shared * 2.0, shared.float()):
        copied._matmul(torch.ones(copied.shape[-1], 1, dtype=copied.dtype))
    shared._matmul(probes.float().double()[: len(probes)].unsqueeze(0).expand(2, -1, -1))
    assert quadrature.wanted is before
    shared._matmul(probes)
    assert quadrature.wanted is not before


def test_another_operator_stays_as_it_is() -> None:
    operator, factor, probes = counting_system()
    dense = DenseLinearOperator(operator.to_dense())
    assert SharedProducts.of(dense, LogDeterminantQuadrature(dense, probes, factor)) is dense

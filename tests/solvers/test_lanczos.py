"""The log-determinant's estimate is unbiased, and its standard error honest."""

import pytest
import torch

from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.solvers import stochastic_logdet
from tests.monte_carlo import assert_mean_within
from tests.solvers.test_solvers import N, system


@pytest.mark.parametrize("rank", [1, 20])
def test_mean_and_error(rank: int) -> None:
    operator, _ = system()
    truth = torch.logdet(operator.to_dense())
    preconditioner = PivotedCholesky(rank=rank).build(operator)
    generator = torch.Generator().manual_seed(0)
    estimates, sems = [], []
    for _ in range(60):
        base = torch.randint(0, 2, (preconditioner.rank + N, 4), generator=generator).double() * 2 - 1
        probes = preconditioner.sample(base[:-N], base[-N:])
        estimate = stochastic_logdet(operator, probes, preconditioner, max_iterations=60, tolerance=1e-9)
        estimates.append(estimate.mean)
        sems.append(estimate.sem)
    estimates = torch.stack(estimates)
    assert_mean_within(estimates, truth, max_sem=1.5)
    ratio = torch.stack(sems).square().mean().sqrt() / estimates.std()
    assert 0.7 < ratio < 1.4


def test_full_rank_preconditioner_leaves_nothing_to_estimate() -> None:
    operator, _ = system()
    preconditioner = PivotedCholesky(rank=N).build(operator)
    probes = preconditioner.sample(torch.ones(preconditioner.rank, 2).double(), torch.ones(N, 2).double())
    estimate = stochastic_logdet(operator, probes, preconditioner)
    torch.testing.assert_close(estimate.mean, torch.logdet(operator.to_dense()), rtol=1e-6, atol=1e-6)
    assert estimate.sem < 1e-6

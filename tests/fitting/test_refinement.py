"""The exact curvature along the directions in which nats are left."""

import gpytorch
import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.fitting import AverageInformation, FitStatus
from gpy_iterative.fitting.steps.refinement import refined
from tests.exact.gaussian_models import Regression
from tests.fitting.problems import dense_optimum, dense_value, failing_evaluations, parameters, quiet, regression

RADIUS = torch.full((5,), 2.0, dtype=torch.float64)


def positive(seed: int) -> Tensor:
    root = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT + torch.eye(5, dtype=torch.float64)


class Quadratic:
    """Differences of the gradient of a quadratic function, counted."""

    def __init__(self, curvature: Tensor) -> None:
        self.curvature, self.count = curvature, 0

    def __call__(self, move: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return move, self.curvature @ move


def left(matrix: Tensor, gradient: Tensor) -> float:
    return float(0.5 * gradient @ torch.linalg.solve(matrix, gradient))


@pytest.mark.parametrize(("rank", "least"), [(1, 0.95), (2, 0.5)])
def test_nats_that_a_too_large_curvature_hides_are_found(rank: int, least: float) -> None:
    exact = positive(0)
    hidden = torch.randn(5, rank, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = exact + 50 * hidden @ hidden.mT
    gradient = exact @ hidden.sum(-1) / 5
    values = Quadratic(exact)
    found = refined(matrix, gradient, RADIUS, values)
    assert left(matrix, gradient) < 0.3 * left(exact, gradient)
    assert least < left(found, gradient) / left(exact, gradient) < 1 + 1e-9
    assert values.count <= rank + 1
    assert torch.linalg.eigvalsh(found).min() > 0


def test_a_curvature_that_is_exact_costs_one_difference_and_stays() -> None:
    values = Quadratic(positive(0))
    found = refined(values.curvature, 0.1 * torch.ones(5, dtype=torch.float64), RADIUS, values)
    torch.testing.assert_close(found, values.curvature)
    assert values.count == 1


@pytest.mark.parametrize("curvature", [-1.0, 0.0, 0.01])
def test_a_value_that_grows_beyond_the_radius_counts_as_far_as_it(curvature: float) -> None:
    exact = torch.diag(torch.tensor([curvature, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    gradient = torch.tensor([0.05, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    found = refined(torch.eye(5, dtype=torch.float64), gradient, RADIUS, Quadratic(exact))
    assert left(found, gradient) == pytest.approx(0.05 * 2 - 0.5 * curvature * 2**2)
    torch.testing.assert_close(found[1:, 1:], exact[1:, 1:])


def test_a_gradient_of_zero_needs_no_difference() -> None:
    values = Quadratic(positive(0))
    assert torch.equal(refined(values.curvature, torch.zeros_like(RADIUS), RADIUS, values), values.curvature)
    assert values.count == 0


def test_without_values_nearby_the_curvature_stays() -> None:
    matrix = positive(0)
    assert torch.equal(refined(matrix, torch.ones(5, dtype=torch.float64), RADIUS, lambda move: None), matrix)


def test_without_a_gradient_the_curvature_stays() -> None:
    matrix = positive(0)
    values = Quadratic(matrix)
    assert torch.equal(refined(matrix, torch.zeros(5, dtype=torch.float64), RADIUS, values), matrix)
    assert values.count == 0


def test_an_interrupted_difference_changes_nothing() -> None:
    """The next call said that a variable was modified by an inplace operation."""
    mll = regression(100)
    quiet(mll)
    optimiser, before = AverageInformation(mll), parameters(mll)
    with failing_evaluations(mll, KeyboardInterrupt(), after=1, times=1), pytest.raises(KeyboardInterrupt):
        optimiser.assess()
    assert all(map(torch.equal, mll.parameters(), before))
    assert optimiser.assess().left == AverageInformation(mll).assess().left


def test_moves_are_short_and_may_be_cut_by_bounds() -> None:
    matrix, moves = positive(0), []

    def bounded(move: Tensor) -> tuple[Tensor, Tensor]:
        moves.append(move)
        return move * torch.tensor([0, 1, 1, 1, 1]), matrix @ (move * torch.tensor([0, 1, 1, 1, 1]))

    found = refined(matrix, torch.ones(5, dtype=torch.float64), RADIUS, bounded)
    torch.testing.assert_close(found, matrix)
    assert all(0 < move.abs().max() <= 0.05 for move in moves)
    assert all(0.5 * move @ matrix @ move <= 0.05 for move in moves)


@pytest.mark.parametrize(("num_data", "seed"), [(40, 5), (60, 5), (100, 1)])
def test_exact_fits_end_where_nothing_is_left(num_data: int, seed: int) -> None:
    """By the average information alone they end .93, .19 and .23 nats below the optimum."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_data, 6, generator=generator).double()
    z = 4 * x - 2
    y = (100 * (z[:, 1:] - z[:, :-1].square()).square() + (1 - z[:, :-1]).square()).sum(-1)
    y = (y - y.mean()) / y.std() + 0.1 * torch.randn(num_data, generator=generator).double()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=6))
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
    assert quiet(mll).status is FitStatus.CONVERGED
    value = dense_value(mll)
    assert dense_optimum(mll) - value < 0.05

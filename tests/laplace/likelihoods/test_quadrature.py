"""Expectations of densities under normal distributions, against a grid as fine as it takes."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn.functional import logsigmoid, softplus

from gpy_iterative.laplace.likelihoods.quadrature import dense_marginal, log_concave_marginal

Function = Callable[[Tensor], Tensor]


def poisson(count: float) -> tuple[Function, Function]:
    return lambda f: count * f - f.exp() - math.lgamma(count + 1), lambda f: count - f.exp()


def on_a_grid(log_density: Function, mean: Tensor, deviation: float) -> Tensor:
    grid = torch.linspace(-14, 14, 100_001, dtype=torch.float64).unsqueeze(-1)
    weights = Normal(0.0, 1.0).log_prob(grid) + math.log(28 / 100_000)
    return torch.logsumexp(weights + log_density(mean + deviation * grid), 0)


LOGIT: tuple[Function, Function] = (logsigmoid, lambda f: torch.sigmoid(-f))
MEANS = torch.tensor([-3.0, 0.0, 1.0, 5.0], dtype=torch.float64)


@pytest.mark.parametrize("deviation", [1.0, 3.0, 10.0, 30.0, 100.0])
@pytest.mark.parametrize("functions", [LOGIT, poisson(0.0), poisson(3.0), poisson(280.0)])
def test_narrow_densities_do_not_fall_between_the_nodes(functions: tuple[Function, Function], deviation: float) -> None:
    variance = torch.full_like(MEANS, deviation**2)
    found = log_concave_marginal(*functions, MEANS, variance)
    torch.testing.assert_close(found, on_a_grid(functions[0], MEANS, deviation), rtol=0, atol=1e-6)


@pytest.mark.parametrize("noise", [1e-8, 1e-3, 1.0, 1e4])
def test_normal_densities_are_exact(noise: float) -> None:
    variance = torch.full_like(MEANS, 4.0)
    found = log_concave_marginal(
        lambda f: Normal(f, noise**0.5).log_prob(torch.tensor(0.7)),
        lambda f: (0.7 - f) / noise,
        MEANS,
        variance,
    )
    exact = Normal(MEANS, (variance + noise).sqrt()).log_prob(torch.tensor(0.7))
    torch.testing.assert_close(found, exact, rtol=1e-7, atol=1e-7)


def test_no_variance_is_the_density_itself() -> None:
    nothing = torch.zeros_like(MEANS)
    torch.testing.assert_close(log_concave_marginal(*poisson(3.0), MEANS, nothing), poisson(3.0)[0](MEANS))
    torch.testing.assert_close(dense_marginal(poisson(3.0)[0], MEANS, nothing), poisson(3.0)[0](MEANS))
    empty = MEANS[:0]
    assert log_concave_marginal(*LOGIT, empty, empty).shape == dense_marginal(logsigmoid, empty, empty).shape == (0,)


def test_derivatives_are_those_of_the_integral() -> None:
    mean, variance = MEANS.clone().requires_grad_(), torch.full_like(MEANS, 4.0).requires_grad_()
    torch.autograd.gradcheck(lambda m, v: log_concave_marginal(*poisson(3.0), m, v), (mean, variance), atol=1e-5)


def test_dense_nodes_serve_densities_with_two_ends() -> None:
    scale = 0.05
    cauchy = torch.distributions.Cauchy(torch.tensor(4.0, dtype=torch.float64), scale)
    variance = torch.ones_like(MEANS)
    torch.testing.assert_close(
        dense_marginal(cauchy.log_prob, MEANS, variance), on_a_grid(cauchy.log_prob, MEANS, 1.0), rtol=1e-5, atol=1e-5
    )


def negative_binomial(count: float) -> Function:
    """Of softplus(f) failures, each with probability 1/2."""

    def log_prob(f: Tensor) -> Tensor:
        failures = softplus(f)
        ways = torch.lgamma(count + failures) - torch.lgamma(failures) - math.lgamma(count + 1)
        return ways - (count + failures) * math.log(2)

    return log_prob


@pytest.mark.parametrize(
    ("density", "mean", "deviation"),
    [
        pytest.param(poisson(1e5)[0], 11.0, 1.0, id="narrow"),
        pytest.param(negative_binomial(1e5), 0.0, 3e5, id="narrower"),
        pytest.param(negative_binomial(1e5), 1e3, 300.0, id="far"),
        pytest.param(poisson(1000.0)[0], 0.0, 0.1, id="outlier"),
        pytest.param(poisson(0.0)[0], 900.0, 30.0, id="overflow"),
    ],
)
def test_dense_nodes_find_what_is_narrow_or_far(density: Function, mean: float, deviation: float) -> None:
    """Errors were .008 to 3e4; in the last, most of the integrand is infinite."""
    place, variance = (torch.tensor([value], dtype=torch.float64) for value in (mean, deviation**2))
    found = dense_marginal(density, place, variance)
    grid = torch.linspace(-40, 160, 400_001, dtype=torch.float64)
    values = Normal(0.0, 1.0).log_prob(grid) + density(mean + deviation * grid).nan_to_num(nan=-torch.inf)
    torch.testing.assert_close(found.squeeze(), torch.logsumexp(values, 0) + math.log(200 / 4e5), rtol=1e-9, atol=1e-6)


def test_the_search_goes_beyond_its_reach_only_where_the_density_rises_there() -> None:
    visited = []

    def density(f: Tensor) -> Tensor:
        visited.append(f)
        return poisson(1000.0)[0](f)

    mean = torch.tensor([0.0, 7.0], dtype=torch.float64)
    dense_marginal(density, mean, torch.full_like(mean, 0.01))
    farthest = torch.stack(visited).amax(0)
    assert float(farthest[0]) > 5.0
    assert float(farthest[1]) == pytest.approx(7.0 + 0.1 * 12)

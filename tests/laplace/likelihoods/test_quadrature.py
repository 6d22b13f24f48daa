"""Expectations of densities under normal distributions, against a grid as fine as it takes."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn.functional import logsigmoid

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

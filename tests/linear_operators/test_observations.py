"""Every kind of prior and likelihood becomes the operator that GPyTorch would have evaluated, gradients included."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import LinearOperator

from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, noisy_operator
from gpy_iterative.linear_operators.from_gpytorch import noise_operator
from tests.exact.gaussian_models import CASES

PRODUCTS = KernelProducts(tile_size=16)


@pytest.mark.parametrize("name", CASES)
def test_operator_equals_gpytorchs_matrix_with_gradients(name: str) -> None:
    case = CASES[name]()
    case.model.train()
    parameters = list(case.model.parameters())
    operator = noisy_operator(case.likelihood, case.model(case.x), *case.params, products=PRODUCTS)
    expected = case.likelihood(case.model(case.x), *case.params).lazy_covariance_matrix.to_dense()
    rhs = torch.randn(*expected.shape[:-1], 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert operator.shape == expected.shape
    with torch.no_grad():
        torch.testing.assert_close(operator._matmul(rhs), expected @ rhs)
        torch.testing.assert_close(operator.to_dense(), expected)
    theirs = torch.autograd.grad((rhs * (expected @ rhs)).sum(), parameters, allow_unused=True, retain_graph=True)
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(
            operator.representation(), torch.no_grad()(operator._bilinear_derivative)(rhs, rhs), strict=True
        )
        if gradient is not None
    ]
    ours = torch.autograd.grad(
        [tensor for tensor, _ in pairs], parameters, [gradient for _, gradient in pairs], allow_unused=True
    )
    for parameter, mine, other in zip(parameters, ours, theirs, strict=True):
        zero = torch.zeros_like(parameter)
        torch.testing.assert_close(
            zero if mine is None else mine, zero if other is None else other, atol=1e-8, rtol=1e-8
        )


def test_jitter_of_the_model_goes_to_the_noise() -> None:
    case = CASES["sum-in-forward"]()
    operator = noisy_operator(case.likelihood, case.model(case.x), products=PRODUCTS)
    assert isinstance(operator, NoisyLinearOperator)
    torch.testing.assert_close(operator.noise, (case.likelihood.noise + 1e-3).expand(40))


def test_one_thread_at_a_time_evaluates_a_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A noise that is a model's prediction enters GPyTorch's settings, which two threads at once would leave switched."""
    likelihood, prior = GaussianLikelihood(), MultivariateNormal(torch.zeros(4), torch.eye(4))
    evaluate, inside, most = likelihood._shaped_noise_covar, [], []

    def slowly(*args: Any, **kwargs: Any) -> LinearOperator:
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(likelihood, "_shaped_noise_covar", slowly)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: noise_operator(likelihood, prior), range(3)))
    assert most == [1, 1, 1]

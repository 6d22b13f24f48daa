"""After a refresh, a full batch is the exact marginal log likelihood: value and every gradient."""

import gpytorch
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.features.weight_space import problem
from tests.exact.gaussian_models import CASES, Case
from tests.exact.test_exact import value_and_gradients
from tests.features.feature_models import KERNELS, feature_case, fixed_noise_case, fourier

METHODS = {
    "natural": lambda lik, model, **o: gpi.mlls.VariationalFeatureMarginalLogLikelihood(lik, model, **o),
    "natural-uncentred": lambda lik, model, **o: gpi.mlls.VariationalFeatureMarginalLogLikelihood(
        lik, model, centred=False, **o
    ),
    "natural-unbiased": lambda lik, model, **o: gpi.mlls.VariationalFeatureMarginalLogLikelihood(
        lik, model, include_batch=False, **o
    ),
    "gradient": lambda lik, model, **o: gpi.mlls.VariationalFeatureMarginalLogLikelihood(
        lik, model, update="gradient", **o
    ),
    "compositional": lambda lik, model, **o: gpi.mlls.CompositionalMarginalLogLikelihood(lik, model, **o),
    "minimax": lambda lik, model, **o: gpi.mlls.MinimaxMarginalLogLikelihood(lik, model, **o),
    "minibatch": lambda lik, model, **o: gpi.mlls.MinibatchMarginalLogLikelihood(lik, model, **o),
}


def assert_exact(case: Case, method: str) -> None:
    n = len(case.y)
    with gpytorch.settings.fast_computations(False, False, False):
        expected, expected_gradients = value_and_gradients(
            gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model), case
        )
    mll = METHODS[method](case.likelihood, case.model, batch_size=n)
    value, gradients = value_and_gradients(mll, case)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-8, atol=1e-8, msg=lambda m, p=name: f"{p}: {m}"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem, "CHUNK_SIZE", 7)
        torch.testing.assert_close(mll.exact_value(), expected, rtol=1e-8, atol=1e-8)
    for parameter in set(mll.parameters()) - set(case.model.parameters()):  # stationary: these are the posterior
        assert parameter.grad.abs().max() < 1e-7
    if method != "minibatch":
        assert 0 <= mll.gap() < 1e-8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_gpytorch(kernel: str, method: str) -> None:
    assert_exact(feature_case(KERNELS[kernel]()), method)


@pytest.mark.parametrize("method", METHODS)
def test_fixed_noise_with_more(method: str) -> None:
    assert_exact(fixed_noise_case(), method)


@pytest.mark.parametrize("method", METHODS)
def test_heteroskedastic_noise_model(method: str) -> None:
    case = CASES["heteroskedastic"]()
    kernel = kernels.ScaleKernel(fourier()).double()
    case.model.covar_module = kernel
    assert_exact(case, method)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_a_batch_of_an_additive_structure_in_two_dimensions() -> None:
    case = feature_case(kernels.AdditiveStructureKernel(kernels.LinearKernel(active_dims=(0, 2)), 2))
    mll = METHODS["minibatch"](case.likelihood, case.model, batch_size=len(case.y))
    expected = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)
    torch.testing.assert_close(value_and_gradients(mll, case), value_and_gradients(expected, case))

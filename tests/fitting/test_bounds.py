"""Parameters at the ends of constraints and of the supports of priors."""

import copy
import math
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive
from gpytorch.priors import GammaPrior, LKJCovariancePrior, LogNormalPrior, NormalPrior, UniformPrior

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.fitting import AverageInformation, FitStatus
from gpy_iterative.fitting.coordinates import Coordinates
from gpy_iterative.fitting.prior_support import is_in_supports
from gpy_iterative.fitting.result import estimated
from tests.fitting.problems import failing_evaluations, parameters, regression


def matern(**options: Any) -> gpytorch.kernels.Kernel:
    return gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, **options))


def test_intervals_end_at_bounds() -> None:
    covariance = matern(lengthscale_constraint=Interval(0.2, 2.5), lengthscale_prior=UniformPrior(0.1, 1.5))
    coordinates = Coordinates(regression(20, covariance=covariance))
    count = len(coordinates)
    nothing = torch.zeros(count, dtype=torch.float64)
    found = estimated(coordinates, torch.eye(count).double(), nothing, nothing.bool())
    ends = {each.name: (each.low, each.high) for each in found}
    assert ends["covar_module.base_kernel.lengthscale"] == pytest.approx((0.2, 1.5), rel=2e-3)
    assert ends["noise_covar.noise"][1] == pytest.approx(found[0].value * math.exp(1.96))
    assert all(each.standard_error == 1 for each in found)


# Priors


def test_the_support_of_a_prior_bounds_its_parameter_alone() -> None:
    mll = regression(20, covariance=matern(ard_num_dims=3, lengthscale_prior=UniformPrior(0.5, 3.0)))
    coordinates = Coordinates(mll)
    is_bounded = torch.tensor(["lengthscale" in name for name in coordinates.names])
    assert torch.allclose(coordinates.upper[is_bounded].exp(), torch.tensor(3.0).double(), rtol=2e-3)
    assert torch.allclose(coordinates.lower[is_bounded].exp(), torch.tensor(0.5).double(), rtol=2e-3)
    assert not coordinates.upper[~is_bounded].isfinite().any()


@pytest.mark.parametrize("prior", [GammaPrior(2.0, 1.0), NormalPrior(0.0, 1.0)], ids=["positive", "real"])
def test_supports_that_a_constraint_contains_change_no_bound(prior: gpytorch.priors.Prior) -> None:
    with_prior = Coordinates(regression(20, covariance=matern(lengthscale_prior=prior)))
    without = Coordinates(regression(20, covariance=matern()))
    assert torch.equal(with_prior.lower, without.lower)
    assert torch.equal(with_prior.upper, without.upper)


def test_adam_holds_the_parameter_at_the_end_of_its_prior_alone() -> None:
    """Shrinking whole steps, it stopped 120 nats from the optimum and said that it had converged."""
    found = {}
    for method in ("average_information", "adam"):
        mll = regression(80, covariance=matern(lengthscale_prior=UniformPrior(0.1, 0.72)))
        result = gpi.fit(mll, method=method, progress=False)
        assert result.status is gpi.fitting.FitStatus.BOUND
        assert [each.name for each in result.hyperparameters if each.at_bound] == [
            "covar_module.base_kernel.lengthscale"
        ]
        assert "lengthscale 0.719" in str(result)
        assert "(at its bound)" in str(result)
        found[method] = result.history[-1].value
    assert found["adam"] == pytest.approx(found["average_information"], abs=0.5 / 80)


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraint", [GreaterThan(1e-4, transform=None), Interval(1e-4, 50.0, transform=None)], ids=["floor", "interval"]
)
def test_adam_moves_a_value_without_a_transform_by_its_coordinate(constraint: Interval) -> None:
    """BoTorch's constraints: steps that made the noise negative were not made, and fits 40 nats below had CONVERGED."""
    found = {}
    for method in ("average_information", "adam"):
        likelihood = gpytorch.likelihoods.GaussianLikelihood(LogNormalPrior(-4.0, 1.0), copy.deepcopy(constraint))
        mll = regression(80, covariance=matern(lengthscale_constraint=Positive(transform=None)), likelihood=likelihood)
        likelihood.noise = 0.0067
        mll.model.covar_module.base_kernel.lengthscale = 0.02
        result = gpi.fit(mll, method=method, progress=False)
        assert result.status is FitStatus.CONVERGED
        found[method] = result.history[-1].value
    assert found["adam"] == pytest.approx(found["average_information"], abs=0.5 / 80)


def test_adam_moves_a_value_with_an_upper_bound_only_as_it_is() -> None:
    mll = regression(40)
    mll.model.mean_module = gpytorch.means.ConstantMean(constant_constraint=LessThan(5.0, transform=None)).double()
    gpi.fit(mll, method="adam", max_steps=1, progress=False)
    assert mll.model.mean_module.constant.abs().item() == pytest.approx(0.1)


def test_adam_holds_a_value_without_a_transform_at_its_bound() -> None:
    constraint = GreaterThan(0.2, transform=None, initial_value=0.25)
    mll = regression(80, likelihood=gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint))
    result = gpi.fit(mll, method="adam", progress=False)
    assert result.status is FitStatus.BOUND
    assert [each.name for each in result.hyperparameters if each.at_bound] == ["noise_covar.noise"]


@pytest.mark.parametrize("method", ["average_information", "adam"])
def test_a_prior_on_something_else_refuses_steps(method: Any) -> None:
    """Of twice the lengthscale: no coordinate knows the bound, and torch raises a ValueError beyond it."""
    mll = regression(60, covariance=matern())
    kernel = mll.model.covar_module.base_kernel
    kernel.lengthscale = 0.2
    kernel.register_prior("doubled", UniformPrior(0.2, 0.6), lambda module: 2 * module.lengthscale)
    result = gpi.fit(mll, method=method, progress=False, max_steps=60)
    assert result.history[-1].value > result.history[0].value
    assert 0.25 < kernel.lengthscale.item() < 0.3001


def test_a_start_outside_of_a_support_is_moved_inside() -> None:
    for method in ("average_information", "adam"):
        mll = regression(40, covariance=matern(lengthscale_prior=UniformPrior(1.0, 5.0)))
        gpi.fit(mll, method=method, progress=False, max_steps=2)
        assert 1.0 < mll.model.covar_module.base_kernel.lengthscale.item() < 5.0


def test_transformed_priors() -> None:
    prior = UniformPrior(-1.0, 0.0, transform=torch.log)
    mll = regression(20, covariance=matern(lengthscale_prior=prior))
    assert not Coordinates(mll).upper.isfinite().any()
    assert is_in_supports(mll.model)  # log .69
    mll.model.covar_module.base_kernel.lengthscale = 1.1
    assert not is_in_supports(mll.model)


def test_a_prior_on_a_covariance_of_tasks() -> None:
    """GPyTorch's class has no `_transform`; BoTorch's KroneckerMultiTaskGP uses it."""
    index = gpytorch.kernels.IndexKernel(2, rank=2, prior=LKJCovariancePrior(2, 1.5, UniformPrior(0.05, 3.0)))
    index.covar_factor.data = torch.eye(2)
    assert is_in_supports(index)
    index.covar_factor.data = 4 * torch.eye(2)
    assert not is_in_supports(index)


def test_a_prior_and_a_constraint_with_nothing_in_common() -> None:
    kernel = matern(lengthscale_prior=UniformPrior(1.0, 2.0), lengthscale_constraint=GreaterThan(3.0))
    with pytest.raises(ValueError, match=r"lengthscale have no value in common"):
        gpi.fit(regression(20, covariance=kernel), progress=False)


# Starts


@pytest.mark.parametrize("start", ["current", "subsets"])
@pytest.mark.parametrize("method", ["average_information", "adam"])
def test_a_start_that_cannot_be_evaluated_leaves_the_parameters(
    method: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gpy_iterative.fitting.fit.initialize_from_subsets",
        lambda model, *_, **__: model.covar_module.base_kernel.raw_lengthscale.data.fill_(0.7),
    )
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=GreaterThan(1e-4))
    mll = regression(60, likelihood=likelihood)
    likelihood.noise_covar.raw_noise.data.fill_(-200.0)  # at its bound, out of which it is moved
    before = parameters(mll)
    looks = 2 if method == "average_information" else 1  # at data and method, before parameters are moved
    after = looks + 2 * (start == "subsets")
    with failing_evaluations(mll, NonFiniteError("no"), after=after), pytest.raises(NonFiniteError, match="no"):
        gpi.fit(mll, method=method, start=start, progress=False)
    assert all(map(torch.equal, parameters(mll), before))


def test_a_first_step_that_cannot_be_evaluated_leaves_the_parameters() -> None:
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=GreaterThan(1e-4))
    mll = regression(60, likelihood=likelihood)
    likelihood.noise_covar.raw_noise.data.fill_(-200.0)
    optimiser, before = AverageInformation(mll), parameters(mll)
    with failing_evaluations(mll, NonFiniteError("no"), after=0), pytest.raises(NonFiniteError, match="no"):
        optimiser.step()
    assert all(map(torch.equal, parameters(mll), before))


# Intervals


@pytest.mark.parametrize("interval", [Interval(0.0, 0.3), Interval(0.1, 0.3)], ids=["from zero", "positive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_optimum_at_the_end_of_an_interval(interval: Interval, dtype: torch.dtype) -> None:
    mll = regression(60, covariance=matern(lengthscale_constraint=interval)).to(dtype)
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    mll.model.set_train_data(x.to(dtype), y.to(dtype), strict=False)
    result = gpi.fit(mll, progress=False)
    assert result.status is FitStatus.BOUND
    assert "covar_module.base_kernel.lengthscale 0.2997 (at its bound)" in str(result)


def test_an_optimum_at_the_end_of_an_interval_with_both_signs() -> None:
    mll = regression(60)
    mll.model.mean_module = gpytorch.means.ConstantMean(constant_constraint=Interval(-0.1, 0.1)).double()
    mll.model.set_train_data(targets=mll.model.train_targets + 3, strict=False)
    result = gpi.fit(mll, progress=False)
    assert result.status is FitStatus.BOUND
    (held,) = (each for each in result.hyperparameters if each.at_bound)
    assert held.name == "mean_module.constant"
    assert held.value == pytest.approx(0.1, rel=5e-3)

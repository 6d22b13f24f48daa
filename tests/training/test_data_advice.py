"""Warnings of data that a fit cannot do much with from where it starts."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel

import gpy_iterative as gpi
from gpy_iterative.errors import DataWarning
from gpy_iterative.fitting.choice import system_now
from gpy_iterative.training import data_advice
from gpy_iterative.training.data_advice import warn_of_data, warn_of_latent_model, warn_of_model
from tests.exact.gaussian_models import CASES, Regression, data
from tests.features.feature_models import fourier
from tests.laplace.cases import LaplaceModel

Data = tuple[torch.Tensor, torch.Tensor]


def standardised(n: int = 200, d: int = 18) -> Data:
    """Correlated inputs of many columns, some of them rounded, as those of elevators are."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(4, d, generator=generator, dtype=torch.float64)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64) @ mixing
    x = x + 0.3 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    x[:, ::3] = x[:, ::3].round()
    y = torch.sin(x[:, 0]) + x[:, 1] + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def advice(
    x: torch.Tensor,
    y: torch.Tensor,
    kernel: gpytorch.kernels.Kernel | None = None,
    likelihood: gpytorch.likelihoods.Likelihood | None = None,
) -> list[str]:
    """The sentences, in order."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood() if likelihood is None else likelihood
    kernel = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=x.shape[-1])) if kernel is None else kernel
    model = Regression(x, y, likelihood, kernel).to(x.dtype)
    return advice_on(model, likelihood)


def advice_on(model: gpytorch.models.ExactGP, likelihood: gpytorch.likelihoods.Likelihood) -> list[str]:
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_data(model, likelihood, system_now(mll))
    assert all(each.category is DataWarning for each in caught)
    return [str(each.message) for each in caught]


# Data without a warning


def test_large_lengthscales_of_standardised_inputs() -> None:
    """A fit has made them large: the data do not need these inputs."""
    x, y = standardised()
    kernel = MaternKernel(nu=1.5, ard_num_dims=x.shape[-1])
    kernel.lengthscale = torch.tensor([1.0] * 16 + [1e5] * 2)
    assert advice(x, y, ScaleKernel(kernel)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [RBFKernel, MaternKernel])
def test_standardised_data(kernel: Callable[..., gpytorch.kernels.Kernel], dtype: torch.dtype) -> None:
    x, y = (tensor.to(dtype) for tensor in standardised())
    for ard_num_dims in (None, x.shape[-1]):
        assert advice(x, y, ScaleKernel(kernel(ard_num_dims=ard_num_dims))) == []


@pytest.mark.parametrize("name", ["rbf", "batch", "multitask", "deep", "periodic", "additive", "fixed-noise"])
def test_models_of_every_kind(name: str) -> None:
    case = CASES[name]() if name != "periodic" else None
    if case is None:
        assert advice(*data(), ScaleKernel(PeriodicKernel())) == []
    else:
        assert advice_on(case.model, case.likelihood) == []


def test_a_time_series_in_days() -> None:
    days = torch.arange(500, dtype=torch.float64).unsqueeze(-1)
    assert advice(days, torch.sin(days[:, 0] / 20)) == []


def test_replicates_that_noise_explains() -> None:
    x, y = standardised(100)
    generator = torch.Generator().manual_seed(1)
    again = y + 0.1 * torch.randn(100, generator=generator, dtype=torch.float64)
    noise = torch.full((200,), 0.01, dtype=torch.float64)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    assert advice(torch.cat([x, x]), torch.cat([y, again]), likelihood=likelihood) == []


# Data with one


def test_equal_terms_of_a_sum() -> None:
    x, y = standardised(d=2)
    long = ScaleKernel(RBFKernel())
    long.base_kernel.lengthscale = 3.0
    assert not advice(x, y, ScaleKernel(RBFKernel()) + long)
    assert not advice(x, y, ScaleKernel(RBFKernel(active_dims=[0])) + ScaleKernel(RBFKernel(active_dims=[1])))
    (sentence,) = advice(x, y, long + ScaleKernel(RBFKernel()) + ScaleKernel(RBFKernel()))
    assert "Two terms of the kernel's sum are equal" in sentence


def test_equal_components_of_a_spectral_mixture() -> None:
    x, y = standardised(d=2)
    kernel = gpytorch.kernels.SpectralMixtureKernel(num_mixtures=3, ard_num_dims=2)
    (sentence,) = advice(x, y, kernel)
    assert "initialize_from_data" in sentence
    kernel.mixture_means = torch.tensor([0.1, 0.2, 0.2]).view(3, 1, 1).expand(3, 1, 2)
    assert not advice(x, y, kernel)
    assert not advice(x, y, gpytorch.kernels.SpectralMixtureKernel(num_mixtures=1, ard_num_dims=2))


def test_inputs_that_are_too_far_apart() -> None:
    x, y = standardised()
    (sentence,) = advice(1e3 * x, y)
    assert "lengthscales apart, so the kernel matrix is diagonal" in sentence
    assert "standardise the inputs, or set larger lengthscales" in sentence


def test_space_and_time_that_are_too_far_apart() -> None:
    x, y = standardised()
    kernel = ScaleKernel(MaternKernel(active_dims=range(17)) * MaternKernel(active_dims=[17]))
    assert not advice(x, y, kernel)
    (sentence,) = advice(1e3 * x, y, kernel)
    assert "lengthscales apart, so the kernel matrix is diagonal" in sentence


@pytest.mark.parametrize(("kernel", "is_diagonal"), [(RBFKernel, True), (MaternKernel, False)])
def test_many_standardised_inputs(kernel: type[MaternKernel | RBFKernel], is_diagonal: bool) -> None:
    """The warning goes by correlations, not by distances. `gpi.fit` finds its way from both; other loops may not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 25, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, 0]) + x[:, 1] + 0.3 * torch.randn(150, generator=generator, dtype=torch.float64)
    ends = []
    for lengthscale in (0.69, 5.0):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Regression(x, y, likelihood, ScaleKernel(kernel(ard_num_dims=25))).double()
        model.covar_module.base_kernel.lengthscale = lengthscale
        sentences = advice_on(model, likelihood)
        is_warned = is_diagonal and lengthscale < 1
        assert ["square root of their number" in sentence for sentence in sentences] == [True] * is_warned
        with pytest.warns(DataWarning, match="lengthscales apart") if is_warned else nullcontext():
            result = gpi.fit(gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model), progress=False)
        ends.append(150 * result.history[-1].value)
    assert abs(ends[1] - ends[0]) < 0.1


def test_inputs_too_far_apart_for_one_kernel_of_two() -> None:
    x, y = standardised()
    long, short = MaternKernel(nu=1.5), MaternKernel(nu=1.5)
    short.lengthscale = 1e-3
    assert advice(x, y, ScaleKernel(long) + ScaleKernel(short)) == []


def test_columns_that_the_kernel_does_not_see() -> None:
    x, y = standardised()
    x = x.clone()
    x[:, 3] *= 1e-6
    (sentence,) = advice(x, y)
    assert "standardise column 3 of the inputs, or set smaller lengthscales" in sentence
    (sentence,) = advice(1e-6 * x, y)
    assert "columns 0, 1, 2, 3, 4 and others" in sentence


def test_constant_columns() -> None:
    x, y = standardised()
    x = x.clone()
    x[:, 2], x[:, 5] = 1.7, 0.0
    assert advice(x, y) == [
        "The data cannot determine the lengthscale of a constant input: remove columns 2, 5 of the inputs."
    ]
    assert advice(x, y, ScaleKernel(RBFKernel())) == []  # all columns share a lengthscale
    (sentence,) = advice(x, y, ScaleKernel(RBFKernel(ard_num_dims=3, active_dims=[0, 1, 2])))
    assert "remove column 2 of the inputs" in sentence


def test_constant_columns_that_the_kernel_does_not_see() -> None:
    """Such as an exposure of one hour everywhere, which only the mean takes."""
    x, y = standardised()
    x = x.clone()
    x[:, 2] = 1.0
    assert advice(x, y, ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=[0, 1]))) == []

    class Exposed(Regression):
        def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(x[:, 2].log(), self.covar_module(x[:, :2]))

    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    model = Exposed(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    assert advice_on(model, model.likelihood) == []


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_targets_of_another_scale(scale: float) -> None:
    x, y = standardised()
    (sentence,) = advice(x, scale * y)
    assert f"The targets minus the mean have a standard deviation of {scale:.3g}, and the prior one of 1.18" in sentence


def test_a_linear_mean_of_inputs_in_metres() -> None:
    """The targets are standardised; it is the mean that is not."""
    x, y = standardised(d=2)
    x = 5e6 + 1e5 * x
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    kernel.base_kernel.initialize(lengthscale=1e5)
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel)
    model.mean_module = gpytorch.means.LinearMean(2)
    model.mean_module.initialize(weights=torch.tensor([[0.5], [-0.3]]))
    (sentence,) = advice_on(model.double(), model.likelihood)[:1]
    assert sentence.startswith("The targets minus the mean have a standard deviation of 5")
    assert "and the inputs of a linear mean" in sentence


def test_equal_targets() -> None:
    x, y = standardised()
    (sentence,) = advice(x, torch.full_like(y, 1.7))
    assert sentence.startswith("All targets are equal, so there is nothing to learn")


def test_equal_targets_beside_missing_ones() -> None:
    x, y = standardised()
    y = torch.full_like(y, 1.7)
    y[::3] = torch.nan
    with gpytorch.settings.observation_nan_policy("mask"):
        (sentence,) = advice(x, y)
    assert sentence.startswith("All targets are equal, so there is nothing to learn")


def test_one_datum() -> None:
    """A fit shrinks the noise to its bound and the outputscale to nothing: a certain constant."""
    x, y = standardised(20, 3)
    assert len(advice(x[:1], y[:1])) == 1
    with pytest.warns(DataWarning, match="One datum determines no hyperparameters"):
        warn_of_model(LaplaceModel(x[:1], y[:1], gpytorch.likelihoods.StudentTLikelihood()))


def test_no_rows_and_no_columns() -> None:
    x, y = standardised(20, 3)
    warn_of_latent_model(LaplaceModel(x[:0], y[:0], gpytorch.likelihoods.StudentTLikelihood()))
    with pytest.warns(DataWarning, match="All training inputs are equal"):
        warn_of_latent_model(LaplaceModel(x[:, :0], y, gpytorch.likelihoods.StudentTLikelihood()))


def test_a_fit_without_columns() -> None:
    x, y = standardised(20, 3)
    model = Regression(x[:, :0], y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(RBFKernel()))
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model.to(x), generator=0)
    with pytest.warns(DataWarning, match="All training inputs are equal"):
        assert gpi.fit(mll, progress=False).status is gpi.fitting.FitStatus.CONVERGED


def test_one_class() -> None:
    x, y = standardised()
    model = gpi.models.IterativeLaplaceGP(x, torch.ones_like(y), gpi.likelihoods.LogitBernoulliLikelihood())
    with pytest.warns(DataWarning, match="All targets are equal"):
        warn_of_model(model)


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_inputs_of_another_scale_without_gaussian_noise(scale: float) -> None:
    """The fit would end CONVERGED, with a constant prediction."""
    x, y = standardised(100, 3)
    model = LaplaceModel(scale * x, (y > 0).to(y), gpi.likelihoods.LogitBernoulliLikelihood())
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, generator=0)
    with pytest.warns(DataWarning, match="standardise (the|columns 0, 1, 2 of the) inputs"):
        gpi.fit(mll, max_steps=1, progress=False)


class Normalised(LaplaceModel):
    """Its kernel sees inputs that a layer standardises, with the batch's statistics in training."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> None:
        super().__init__(x, y, likelihood)
        self.layer = torch.nn.BatchNorm1d(x.shape[-1], affine=False).to(x)

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return super().forward(self.layer(x))


def test_inputs_that_a_layer_standardises() -> None:
    x, y = standardised(100, 3)
    model = Normalised(1e3 * x, (y > 0).to(y), gpi.likelihoods.LogitBernoulliLikelihood())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_latent_model(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_targets_of_another_scale_with_heavy_tails(scale: float) -> None:
    x, y = standardised(100, 3)
    with pytest.warns(DataWarning, match="standardise the targets"):
        warn_of_latent_model(LaplaceModel(x, scale * y, gpytorch.likelihoods.StudentTLikelihood()))


def test_outliers_of_heavy_tails_and_two_classes() -> None:
    x, y = standardised(100, 3)
    labels, outlier = (y > 0).to(y), y.clone()
    outlier[3] = 1e4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_latent_model(LaplaceModel(x, outlier, gpytorch.likelihoods.StudentTLikelihood()))
        warn_of_latent_model(LaplaceModel(x, labels, gpi.likelihoods.LogitBernoulliLikelihood()))


def test_targets_far_from_the_mean() -> None:
    x, y = standardised()
    (sentence,) = advice(x, y + 50)
    assert "The targets lie 42.5 standard deviations away from the prior's mean" in sentence


def test_a_likelihood_that_is_not_the_model_s() -> None:
    x, y = standardised()
    model = Regression(
        x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(RBFKernel(ard_num_dims=18))
    ).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(gpytorch.likelihoods.GaussianLikelihood().double(), model)
    with pytest.warns(DataWarning, match="not the model's, whose noise stays as it is"):
        gpi.fit(mll, max_steps=1, progress=False)


def test_copies_of_rows() -> None:
    x, y = standardised(100)
    mixed = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    (sentence,) = advice(torch.cat([x, x[:20]])[mixed], torch.cat([y, y[:20]])[mixed])
    assert sentence.startswith("20 of 120 rows are exact copies of others, targets included")


@pytest.mark.parametrize("kind", ["at its floor", "fixed", "not trained"])
def test_equal_inputs_with_targets_that_the_noise_does_not_explain(kind: str) -> None:
    x, y = standardised(100)
    x, y = torch.cat([x, x[:10]]), torch.cat([y, y[:10] + 0.5])
    likelihood = gpytorch.likelihoods.GaussianLikelihood(
        noise_constraint=gpytorch.constraints.GreaterThan(1e-4, initial_value=1.001e-4)
    )
    if kind == "fixed":
        likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((110,), 1e-4, dtype=torch.float64))
    if kind == "not trained":
        likelihood.noise = 2e-4
        assert advice(x, y, likelihood=likelihood) == []
        likelihood.requires_grad_(False)
    (sentence,) = advice(x, y, likelihood=likelihood)
    assert sentence.startswith("10 rows have the inputs of other rows but very different targets")


def test_every_kind_has_a_warning_of_its_own_before_the_first_step() -> None:
    x, y = standardised(60)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(1e3 * x, 1e3 * y, likelihood, ScaleKernel(RBFKernel())).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
    evaluated = []
    evaluate = mll.evaluate
    mll.evaluate = lambda *args: evaluated.append(args) or evaluate(*args)

    def stop(message: Warning | str, *_: object, **__: object) -> None:
        assert not evaluated
        told.append(str(message))

    told: list[str] = []
    with warnings.catch_warnings():
        warnings.showwarning = stop
        warnings.simplefilter("always")
        gpi.fit(mll, progress=False, max_steps=1)
    assert len(told) == 2


def test_other_marginal_log_likelihoods_know_of_constant_columns() -> None:
    x, y = standardised(40)
    x = x.clone()
    x[:, 1] = 3.0
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), RBFKernel(ard_num_dims=18))
    with pytest.warns(DataWarning, match="remove column 1 of the inputs"):
        warn_of_model(model)


def mini_batch_advice(x: torch.Tensor, y: torch.Tensor, kernel: gpytorch.kernels.Kernel | None = None) -> list[str]:
    """The sentences of a fit, in order."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, ScaleKernel(fourier(num_dims=3)) if kernel is None else kernel).to(x)
    mll = gpi.mlls.VariationalFeatureMarginalLogLikelihood(likelihood, model, batch_size=10, generator=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpi.fit(mll, max_steps=1, progress=False)
    assert all(each.category is DataWarning for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("scale", "shift", "sentence"),
    [
        (1.0, 0.0, None),
        (1e3, 0.0, "The targets minus the mean have a standard deviation of 1e+03, and the prior one of"),
        (1e-3, 0.0, "The targets minus the mean have a standard deviation of 0.001, and the prior one of"),
        (1.0, 50.0, "The targets lie 42.5 standard deviations away from the prior's mean"),
        (0.0, 1.0, "All targets are equal"),
    ],
)
def test_targets_of_mini_batches(scale: float, shift: float, sentence: str | None) -> None:
    x, y = standardised(60, 3)
    found = mini_batch_advice(x, scale * y + shift)
    assert [each[: len(sentence or "")] for each in found] == ([] if sentence is None else [sentence])


@pytest.mark.parametrize(
    ("scale", "sentence"), [(1e-4, "Inputs that vary by only"), (1e3, "The nearest training inputs")]
)
def test_inputs_of_mini_batches(scale: float, sentence: str) -> None:
    x, y = standardised(60, 3)
    (found,) = mini_batch_advice(scale * x, y)
    assert found.startswith(sentence)


def test_the_variance_of_mini_batches_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are sorted, as by time: the first ones are not like the others."""
    monkeypatch.setattr(data_advice, "SOME_ROWS", 2)
    y = torch.linspace(0, 10, 60, dtype=torch.float64) ** 3
    kernel = gpytorch.kernels.LinearKernel() + gpytorch.kernels.LinearKernel()
    (sentence,) = mini_batch_advice(y.unsqueeze(-1), y, kernel)
    assert sentence.startswith("Two terms of the kernel's sum are equal")


def test_copies_of_rows_in_mini_batches() -> None:
    x, y = standardised(60, 3)
    (sentence,) = mini_batch_advice(torch.cat([x, x[:20]]), torch.cat([y, y[:20]]))
    assert sentence.startswith("20 of 80 rows are exact copies of others")

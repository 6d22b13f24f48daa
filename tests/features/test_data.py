"""A mini-batch method's state belongs to its data: others start it anew, and what fails leaves no trace."""

import gpytorch
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.features.weight_space import problem
from tests.exact.gaussian_models import CASES, Case
from tests.exact.test_exact import value_and_gradients
from tests.features.feature_models import KERNELS, Counting, feature_case, fourier, network
from tests.features.test_bad_input import assert_refused
from tests.features.test_exact import METHODS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_other_data_of_the_same_size(method: str, how: str) -> None:
    case = feature_case(KERNELS["fourier"]())
    mll = METHODS[method](case.likelihood, case.model, batch_size=40)
    value_and_gradients(mll, case)
    x, y = case.x.flip(0).cos(), 2 * case.y.sin()
    if how == "replaced":
        case.model.set_train_data(x, y)
        case = Case(case.model, case.likelihood, x, y)
    else:
        case.x.copy_(x)
        case.y.copy_(y)
    with gpytorch.settings.fast_computations(False, False, False):
        expected, expected_gradients = value_and_gradients(
            gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model), case
        )
    value, gradients = value_and_gradients(mll, case)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-8, atol=1e-8)


def test_the_same_data_in_other_tensors_cost_no_pass() -> None:
    spy = Counting(network())
    case = feature_case(gpi.kernels.DeepFeatureKernel(spy, kernels.LinearKernel()), dtype=torch.float32)
    mll = METHODS["natural"](case.likelihood, case.model, batch_size=8, generator=0)
    mll(case.model(case.x), case.y)
    spy.rows.clear()
    mll(case.model(case.x), case.y.view(1, -1)[0])
    case.model.set_train_data(case.x.clone(), case.y.clone())
    mll(case.model(case.x), case.y)
    mll.double()
    mll(case.model(case.x.double()), case.y.double())
    state = mll.training_state()
    mll.load_training_state(state)
    mll(case.model(case.x.double()), case.y.double())
    assert spy.rows == [8] * 4


def test_learned_inputs_move_as_hyperparameters_do() -> None:
    spy = Counting(network())
    case = feature_case(gpi.kernels.DeepFeatureKernel(spy, kernels.LinearKernel()))
    inputs = torch.nn.Parameter(case.x)
    case.model.set_train_data(inputs, case.y)
    mll = METHODS["natural"](case.likelihood, case.model, batch_size=8, generator=0)
    optimizer = torch.optim.SGD([inputs, *mll.parameters()], lr=0.01)
    for _ in range(3):
        (-mll(case.model(inputs), case.y)).backward()
        optimizer.step()
    assert spy.rows[-2:] == [8, 8]  # no pass between the steps
    assert inputs.grad.count_nonzero() >= 24


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_first_call_leaves_nothing(method: str) -> None:
    case = feature_case(KERNELS["fourier"]())
    mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=0)
    assert_refused(case, mll, NonFiniteError, "not finite", target=1e200 * case.y)
    assert torch.isfinite(mll(case.model(case.x), case.y))


def test_a_failing_prior_leaves_nothing() -> None:
    case = feature_case(KERNELS["fourier"]())
    mll = METHODS["natural"](case.likelihood, case.model, batch_size=8, generator=0)
    mll(case.model(case.x), case.y)
    outside = lambda module: -module.outputscale
    case.model.covar_module.register_prior("outside", gpytorch.priors.GammaPrior(2.0, 0.5, validate_args=True), outside)
    assert_refused(case, mll, ValueError, "support")


@pytest.mark.parametrize("method", METHODS)
def test_mean_values_that_are_not_finite(method: str) -> None:
    class Diverged(gpytorch.means.Mean):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full_like(x[..., 0], torch.inf)

    case = feature_case(KERNELS["fourier"]())
    mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=0)
    good, case.model.mean_module = case.model.mean_module, Diverged()
    assert_refused(case, mll, NonFiniteError, "mean function")
    for ask in (mll.exact_value, mll.posterior):
        with pytest.raises(NonFiniteError, match="mean function"):
            ask()
    case.model.mean_module = good
    assert torch.isfinite(mll(case.model(case.x), case.y))


def test_an_exact_value_that_is_not_finite() -> None:
    case = feature_case(KERNELS["fourier"]())
    mll = METHODS["natural"](case.likelihood, case.model)
    case.model.set_train_data(case.x, 1e200 * case.y)
    with pytest.raises(NonFiniteError, match="marginal likelihood is not finite"):
        mll.exact_value()


@pytest.mark.parametrize(
    ("method", "name"), [("gradient", "mean"), ("compositional", "mean"), ("minimax", "auxiliary")]
)
def test_weights_that_are_not_finite(method: str, name: str) -> None:
    case = feature_case(KERNELS["fourier"]())
    mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=0)
    mll(case.model(case.x), case.y)
    getattr(mll, name).data.fill_(torch.nan)
    for ask in (mll.gap, lambda: mll(case.model(case.x), case.y)):
        with pytest.raises(NonFiniteError, match=f"The parameter {name} is not finite"):
            ask()
    mll.refresh()
    assert mll.gap() < 1e-8


def test_minimax_projects_before_it_measures_its_gap() -> None:
    case = feature_case(KERNELS["fourier"]())
    mll = METHODS["minimax"](case.likelihood, case.model, batch_size=8, generator=0)
    mll(case.model(case.x), case.y)
    mll.auxiliary.data -= 2 * torch.eye(12).double()  # an optimiser's step out of the positive definite matrices
    assert torch.linalg.eigvalsh(mll.auxiliary).min() < 0
    assert torch.isfinite(mll.gap())


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_in_the_place_of_all_data(method: str) -> None:
    """GPyTorch itself notices only in its debug mode."""
    case = feature_case(KERNELS["fourier"]())
    mll = METHODS[method](case.likelihood, case.model, batch_size=8)
    with (
        gpytorch.settings.debug(False),
        pytest.raises(ValueError, match=r"8 points.* 40 training data.*indices="),
    ):
        mll(case.model(case.x[:8]), case.y[:8])


def test_layers_that_are_put_into_training_mode_on_the_way() -> None:
    extractor = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(5).eval())
    case = feature_case(gpi.kernels.DeepFeatureKernel(extractor, kernels.LinearKernel()))
    mll = METHODS["natural"](case.likelihood, case.model, batch_size=8, generator=0)
    mll(case.model(case.x), case.y)
    case.model.train()
    assert_refused(case, mll, ValueError, "BatchNorm1d in training mode")
    for ask in (mll.exact_value, mll.gap, mll.refresh):
        with pytest.raises(ValueError, match="BatchNorm1d in training mode"):
            ask()


@pytest.mark.parametrize("name", ["heteroskedastic", "fixed-noise"])
def test_arguments_of_the_likelihood_follow_the_training_inputs(name: str) -> None:
    case = CASES[name]()
    case.model.covar_module = kernels.ScaleKernel(fourier()).double()
    arguments = lambda x: (x,) if case.params else ()

    def new() -> gpytorch.mlls.MarginalLogLikelihood:
        return METHODS["natural"](case.likelihood, case.model, batch_size=40)

    mll = new()
    mll.refresh()  # before a call: at the training inputs
    assert mll.gap() < 1e-8
    mll(case.model(case.x), case.y, *arguments(case.x))
    before = mll.exact_value()
    x = 0.5 * case.x.flip(0)
    case.model.set_train_data(x)
    fresh = new()
    fresh(case.model(x), case.y, *arguments(x))
    assert abs(mll.exact_value() - before) > 1e-3
    torch.testing.assert_close(mll.exact_value(), fresh.exact_value(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mll.posterior()(x[:3]).mean, fresh.posterior()(x[:3]).mean, rtol=1e-10, atol=1e-10)


def test_predictions_know_the_noise_of_the_last_call() -> None:
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.linspace(0.05, 0.3, 40).double())
    case = feature_case(KERNELS["fourier"](), likelihood=likelihood)
    mll = METHODS["natural"](case.likelihood, case.model, batch_size=8)
    noise = torch.full((40,), 0.7).double()
    mll(case.model(case.x), case.y, noise=noise)
    found = mll.posterior()(case.x[:3]).mean
    case.model.train()
    case.likelihood.train()
    case.likelihood.noise_covar.noise = noise
    mll(case.model(case.x), case.y)
    torch.testing.assert_close(found, mll.posterior()(case.x[:3]).mean, rtol=1e-10, atol=1e-10)


def test_a_pass_evaluates_a_noise_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["heteroskedastic"]()
    case.model.covar_module = kernels.ScaleKernel(fourier()).double()
    mll = METHODS["natural"](case.likelihood, case.model, batch_size=8)
    noise_model, calls = case.likelihood.noise_covar, []
    forward = noise_model.forward
    monkeypatch.setattr(noise_model, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
    monkeypatch.setattr(problem, "CHUNK_SIZE", 7)
    mll.refresh()
    assert len(calls) == 1

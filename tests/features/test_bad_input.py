"""Every refusal of a mini-batch method names its reason and leaves parameters and state as they were."""

import warnings

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import BiasWarning, NonFiniteError, UnsupportedLikelihoodError
from tests.exact.gaussian_models import CASES, Case, Regression, data
from tests.features.feature_models import KERNELS, feature_case, fixed_noise_case, fourier, network
from tests.features.test_exact import METHODS

MLLS = [
    gpi.mlls.VariationalFeatureMarginalLogLikelihood,
    gpi.mlls.CompositionalMarginalLogLikelihood,
    gpi.mlls.MinimaxMarginalLogLikelihood,
    gpi.mlls.MinibatchMarginalLogLikelihood,
]


def started(method: str = "natural", **options) -> tuple[Case, gpytorch.mlls.MarginalLogLikelihood]:
    case = feature_case(KERNELS["fourier"](), n=30)
    mll = METHODS[method](case.likelihood, case.model, **({"batch_size": 8, "generator": 0} | options))
    (-mll(case.model(case.x), case.y)).backward()
    return case, mll


def assert_refused(
    case: Case, mll: gpytorch.mlls.MarginalLogLikelihood, error: type, match: str, *, target=None, **options
) -> None:
    """The error, and neither state nor parameters nor report moved."""
    state, report = mll.training_state(), mll.report
    values = [p.detach().clone() for p in case.model.parameters()]
    with pytest.raises(error, match=match):
        mll(case.model(case.x), case.y if target is None else target, **options)
    assert all(torch.equal(state[key], tensor) for key, tensor in mll.training_state().items())
    for parameter, value in zip(case.model.parameters(), values, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0, equal_nan=True)
    assert mll.report is report


@pytest.mark.parametrize("mll_class", MLLS)
@pytest.mark.parametrize("batch_size", [0, -1, 31, 2.5, True])
def test_batch_size(mll_class: type, batch_size: object) -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    with pytest.raises(ValueError, match=f"batch_size.* {batch_size}"):
        mll_class(case.likelihood, case.model, batch_size=batch_size)


def test_default_batch_is_all_of_few_data() -> None:
    case, mll = started(batch_size=None)
    assert mll.report.batch_size == 30
    case.model.set_train_data(case.x[:5], case.y[:5], strict=False)
    mll(case.model(case.x[:5]), case.y[:5])
    assert mll.report.num_data == 5


@pytest.mark.parametrize("rate", [0, -0.1, 1.5, float("nan"), "fast", True])
@pytest.mark.parametrize("mll_class", MLLS[:2])
def test_tracker_rate(mll_class: type, rate: object) -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    with pytest.raises(ValueError, match=r"tracker_rate must be (a number|positive and at most 1)"):
        mll_class(case.likelihood, case.model, tracker_rate=rate)


def test_tracker_rate_of_a_function() -> None:
    case, mll = started(tracker_rate=lambda step: 0.5 if step == 0 else 2.0)
    assert_refused(case, mll, ValueError, r"tracker_rate.*2\.0")


@pytest.mark.parametrize(
    "options",
    [{"mu": 0}, {"mu": -1.0}, {"mu": float("nan")}, {"mu": "much"}, {"mu": None}],
)
def test_minimax_options(options: dict) -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be positive"):
        gpi.mlls.MinimaxMarginalLogLikelihood(case.likelihood, case.model, **options)


def test_small_mu_is_told() -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    with pytest.warns(BiasWarning, match="number of features, 12"):
        gpi.mlls.MinimaxMarginalLogLikelihood(case.likelihood, case.model, mu=1.0)


@pytest.mark.parametrize("name", ["include_batch", "centred"])
@pytest.mark.parametrize("value", [0.5, "no", None])
def test_flags(name: str, value: object) -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {value!r}"):
        MLLS[0](case.likelihood, case.model, **{name: value})


def test_update_options() -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    with pytest.raises(ValueError, match="'adam'"):
        MLLS[0](case.likelihood, case.model, update="adam")
    with pytest.raises(ValueError, match="tracker_rate"):
        MLLS[0](case.likelihood, case.model, update="gradient", tracker_rate=0.1)


@pytest.mark.parametrize("mll_class", MLLS[:3])
def test_kernel_without_features(mll_class: type) -> None:
    case = feature_case(kernels.LinearKernel() + kernels.RBFKernel(), n=30)
    with pytest.raises(ValueError, match=r"RBFKernel has no finite feature map.*PolynomialKernel"):
        mll_class(case.likelihood, case.model)


@pytest.mark.parametrize("mll_class", MLLS[:3])
def test_inputs_without_columns(mll_class: type) -> None:
    likelihood, x, y = GaussianLikelihood(), torch.zeros(30, 0), torch.linspace(-1, 1, 30)
    with pytest.raises(ValueError, match="no features at these inputs"):
        mll_class(likelihood, Regression(x, y, likelihood, kernels.LinearKernel()))
    model = Regression(x, y, likelihood, kernels.PolynomialKernel(power=2))  # which has a constant
    expected = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)(model(x), y)
    torch.testing.assert_close(mll_class(likelihood, model).exact_value(), expected)


@pytest.mark.parametrize("mll_class", MLLS)
def test_likelihood_and_model(mll_class: type) -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    with pytest.raises(UnsupportedLikelihoodError, match="BernoulliLikelihood"):
        mll_class(gpytorch.likelihoods.BernoulliLikelihood(), case.model)
    with pytest.raises(TypeError, match="ExactGP"):
        mll_class(GaussianLikelihood(), torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="training data"):
        mll_class(case.likelihood, Regression(None, None, case.likelihood, kernels.LinearKernel()))


@pytest.mark.parametrize("method", METHODS)
def test_targets(method: str) -> None:
    case, mll = started(method)
    for shape, match in (((29,), r"\(30,\).*\(29,\)"), ((30, 1), "squeeze"), ((2, 30), "target")):
        assert_refused(case, mll, ValueError, match, target=torch.zeros(shape, dtype=torch.float64))
    assert_refused(case, mll, ValueError, "float64.*float32", target=case.y.float())
    assert_refused(case, mll, ValueError, "must be a tensor", target=[0.0] * 30)
    y = case.y.clone()
    y[17] = torch.nan
    rows = torch.tensor([3, 17])
    assert_refused(case, mll, ValueError, r"target\[17\] is nan", target=y, indices=rows)
    fresh = METHODS[method](case.likelihood, case.model, batch_size=8)
    assert_refused(case, fresh, ValueError, r"target\[17\] is nan", target=y)  # wherever the first batch is
    with gpytorch.settings.observation_nan_policy("mask"):
        assert_refused(case, fresh, ValueError, r"target\[17\] is nan", target=y)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("indices", "match"),
    [
        (torch.tensor([0, 30]), "between 0 and 29"),
        (torch.tensor([-1, 3]), "between 0 and 29"),
        (torch.tensor([], dtype=torch.int64), "at least one"),
        (torch.tensor([0.0, 1.0]), "whole row numbers"),
        (torch.ones(30, dtype=torch.bool), "whole row numbers"),
        (torch.tensor([[0, 1]]), "whole row numbers"),
        ([0, 1], "whole row numbers"),
    ],
)
def test_indices(method: str, indices: object, match: str) -> None:
    case, mll = started(method)
    assert_refused(case, mll, ValueError, match, indices=indices)


@pytest.mark.parametrize("method", METHODS)
def test_non_finite_hyperparameters_and_losses(method: str) -> None:
    case, mll = started(method)
    mll.training_state()  # does what the last step left to do
    raw = case.model.covar_module.base_kernel.raw_lengthscale
    good = raw.data.clone()
    raw.data.fill_(torch.nan)
    assert_refused(case, mll, NonFiniteError, "raw_lengthscale")
    raw.data.copy_(good)
    assert_refused(case, mll, NonFiniteError, "not finite", target=1e200 * case.y)
    step = mll(case.model(case.x), case.y)
    assert torch.isfinite(step)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_inputs_that_are_not_finite(bad: float) -> None:
    case, mll = started()
    x = case.x.clone()
    x[4, 1] = bad
    case.model.set_train_data(x, case.y)
    case = Case(case.model, case.likelihood, x, case.y)
    with gpytorch.settings.debug(False):  # in which NaN is not equal to itself
        assert_refused(case, mll, ValueError, rf"train_inputs\[4, 1\] is {bad}", indices=torch.tensor([2, 4]))
    with pytest.raises(ValueError, match=rf"train_inputs\[4, 1\] is {bad}"):
        mll.refresh()
    with pytest.raises(ValueError, match=rf"^inputs must be finite, but inputs\[4, 1\] is {bad}"):
        mll.exact_value()
    with pytest.raises(ValueError, match=rf"train_inputs\[4, 1\] is {bad}"):
        MLLS[0](case.likelihood, case.model)


def test_features_that_are_not_finite() -> None:
    class Diverged(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.nan

    case = feature_case(gpi.kernels.DeepFeatureKernel(torch.nn.Identity(), fourier()), n=30)
    mll = METHODS["natural"](case.likelihood, case.model, batch_size=8, generator=0)
    case.model.covar_module.feature_extractor = Diverged()
    assert_refused(case, mll, NonFiniteError, "features are not finite")


@pytest.mark.parametrize("bad", [torch.nan, 0.0, -1.0])
def test_noise(bad: float) -> None:
    case = fixed_noise_case()
    mll = MLLS[0](case.likelihood, case.model, batch_size=8)
    case.likelihood.noise_covar.noise[5] = bad - case.likelihood.second_noise.item()
    assert_refused(case, mll, ValueError, r"noise\[5\]", indices=torch.tensor([5]))


def test_noise_that_is_not_independent_or_of_another_size() -> None:
    x, y = data(30)
    likelihood = FixedNoiseGaussianLikelihood(noise=torch.full((20,), 0.1).double())
    model = Regression(x, y, likelihood, kernels.LinearKernel()).double()
    mll = MLLS[0](likelihood, model)
    with pytest.warns(gpytorch.utils.warnings.GPInputWarning), pytest.raises(ValueError, match="noise"):
        mll(model(x), y)


@pytest.mark.parametrize("name", ["multitask", "batch", "independent-outputs"])
def test_several_outputs(name: str) -> None:
    case = CASES[name]()
    mll = gpi.mlls.MinibatchMarginalLogLikelihood(case.likelihood, case.model, batch_size=8)
    with pytest.raises(ValueError, match="One output"):
        mll(case.model(case.x), case.y)


@pytest.mark.parametrize("mll_class", MLLS[:3])
def test_kernels_with_features_of_several_outputs(mll_class: type) -> None:
    class Outputs(Regression):
        def forward(self, x):
            return MultitaskMultivariateNormal.from_batch_mvn(super().forward(x))

    x, y = data(30)
    shape = torch.Size([2])
    for model_class in (Regression, Outputs):
        likelihood = GaussianLikelihood()
        kernel = kernels.RFFKernel(num_samples=6, num_dims=x.shape[-1], batch_shape=shape)
        model = model_class(x, torch.stack([y, y]), likelihood, kernel, batch=(2,)).double()
        with pytest.raises(ValueError, match=r"One output.*SumMarginalLogLikelihood"):
            mll_class(likelihood, model)


def test_another_number_of_features() -> None:
    case, mll = started()
    case.model.covar_module = kernels.ScaleKernel(fourier(9)).double()
    assert_refused(case, mll, ValueError, "had 12 features.*18 now")


def test_covariances_that_the_model_has_built() -> None:
    class Built(Regression):
        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x).to_dense())

    x, y = data(30)
    likelihood = GaussianLikelihood()
    with pytest.raises(ValueError, match="DenseLinearOperator"):
        MLLS[0](likelihood, Built(x, y, likelihood, kernels.LinearKernel()).double())


def test_a_posterior_in_place_of_the_prior() -> None:
    case, mll = started()
    case.model.eval()
    with (
        pytest.warns(gpytorch.utils.warnings.GPInputWarning),
        pytest.raises(RuntimeError, match=r"model\.train\(\)"),
    ):
        mll(case.model(case.x), case.y)


def test_dtypes_of_kernel_and_data() -> None:
    x, y = data(30)
    likelihood = GaussianLikelihood()
    with pytest.raises(ValueError, match="float"):
        MLLS[0](likelihood, Regression(x, y, likelihood, kernels.LinearKernel()))


@pytest.mark.parametrize("mll_class", MLLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(mll_class: type, dtype: torch.dtype) -> None:
    case = feature_case(KERNELS["linear"](), dtype=dtype)
    with pytest.raises(ValueError, match=rf"need float32 or float64.* {dtype}.*\.float\(\)"):
        mll_class(case.likelihood, case.model)(case.model(case.x), case.y)


@pytest.mark.parametrize("layer", [torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.3), torch.nn.RReLU()])
def test_layers_whose_features_are_the_batchs(layer: torch.nn.Module) -> None:
    extractor = torch.nn.Sequential(network(), layer)
    case = feature_case(gpi.kernels.DeepFeatureKernel(extractor, kernels.LinearKernel()), n=30)
    with pytest.raises(ValueError, match=f"{type(layer).__name__} in training mode"):
        MLLS[0](case.likelihood, case.model)
    layer.eval()
    mll = MLLS[0](case.likelihood, case.model)
    mll(case.model(case.x), case.y)
    gpi.fit(mll, max_steps=1, progress=False)
    assert not layer.training
    layer.train()
    with pytest.raises(ValueError, match="in training mode"):
        mll.refresh()


def test_batch_normalisation_without_statistics_is_refused_in_every_mode() -> None:
    extractor = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(5, track_running_stats=False)).eval()
    case = feature_case(gpi.kernels.DeepFeatureKernel(extractor, kernels.LinearKernel()), n=30)
    with pytest.raises(ValueError, match="BatchNorm1d with track_running_stats=False"):
        MLLS[0](case.likelihood, case.model)


def test_a_grid_that_follows_its_inputs_is_told_its_bounds() -> None:
    options = {"grid_size": 10, "num_dims": 3}
    make = lambda **bounds: feature_case(kernels.GridInterpolationKernel(kernels.RBFKernel(), **options | bounds), n=30)
    case = make()
    with pytest.raises(ValueError, match="GridInterpolationKernel needs grid_bounds= that hold all inputs"):
        MLLS[-1](case.likelihood, case.model)(case.model(case.x), case.y)
    case = make(grid_bounds=[(-5.0, 5.0)] * 3)
    assert torch.isfinite(MLLS[-1](case.likelihood, case.model)(case.model(case.x), case.y))


class Shifted(torch.nn.Module):
    """Of its batch's mean, or by chance."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.of_batch = of_batch
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.training:
            return x
        return x - x.mean(-2, keepdim=True) if self.of_batch else x + 0.2 * torch.randn_like(x)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("of_batch", [True, False])
def test_rows_that_depend_on_others_or_on_chance(of_batch: bool, inside: bool) -> None:
    layer = Shifted(of_batch)
    extractor = torch.nn.Sequential(network(), layer)
    deep = gpi.kernels.DeepFeatureKernel(extractor, kernels.LinearKernel())
    case = feature_case(deep if inside else kernels.LinearKernel(), n=30)
    if not inside:
        last = torch.nn.Linear(5, 1).double()
        torch.nn.init.constant_(last.weight, 0.5)
        torch.nn.init.zeros_(last.bias)
        case.model.mean_module = torch.nn.Sequential(extractor.double(), last, torch.nn.Flatten(0))
    for make in MLLS:
        mll = make(case.likelihood, case.model)
        prior = case.model(case.x)
        calls, position = layer.calls.clone(), torch.get_rng_state()
        with pytest.raises(ValueError, match="first 2 data another mean or covariance beside other rows"):
            mll(prior, case.y)
        assert torch.equal(layer.calls, calls)
        assert torch.equal(torch.get_rng_state(), position)
        layer.eval()
        mll(case.model(case.x), case.y)
        layer.train()
        with pytest.raises(ValueError, match="beside other rows"):
            mll(case.model(case.x), case.y)


@pytest.mark.parametrize("method", METHODS)
def test_training_states_of_others(method: str) -> None:
    _, mll = started(method)
    state = mll.training_state()
    others = [
        ({}, "no training state"),
        (None, "is a dict, got NoneType"),
        ({key: tensor for key, tensor in state.items() if key != "counts.steps"}, "no training state"),
        (state | {"more": torch.tensor(0)}, "no training state"),
    ]
    case = feature_case(KERNELS["polynomial"](), n=30)
    for name in METHODS:
        if name != method:
            other = METHODS[name](case.likelihood, case.model, batch_size=8)
            others.append((other.training_state(), "Use the data and options"))
    if method != "minibatch":
        foreign = METHODS[method](case.likelihood, case.model, batch_size=8).training_state()
        others.append((foreign, "num_features is"))
        others.append((foreign | {"description": state["description"]}, "no training state"))
    for other, match in others:
        with pytest.raises(ValueError, match=match):
            mll.load_training_state(other)
        assert all(torch.equal(tensor, state[key]) for key, tensor in mll.training_state().items())


def train(case: Case, mll: gpytorch.mlls.MarginalLogLikelihood, parameters: list) -> None:
    """Some steps of so small a rate that the weights stay near the posterior."""
    optimizer = torch.optim.SGD(parameters, lr=1e-6)
    for _ in range(14):
        optimizer.zero_grad()
        (-mll(case.model(case.x), case.y)).backward()
        optimizer.step()


@pytest.mark.parametrize("method", ["gradient", "compositional", "minimax"])
def test_an_optimiser_that_forgets_the_weights(method: str) -> None:
    case, mll = started(method)
    train(case, mll, list(mll.parameters()))  # no warning
    with pytest.warns(BiasWarning, match=r"mll\.parameters\(\)"):
        train(case, mll, list(case.model.parameters()))
    case, mll = started(method)
    for parameter in mll.parameters(recurse=False):
        parameter.requires_grad_(False)
    train(case, mll, list(case.model.parameters()))  # fixed on purpose: no warning


@pytest.mark.parametrize("method", ["natural", "gradient"])
def test_l_bfgs_is_warned_of_once(method: str) -> None:
    """Its line search compares values of different batches, but those of given rows are of one."""
    for indices in (torch.arange(8), None):
        case, mll = started(method)
        optimizer = torch.optim.LBFGS(mll.parameters(), lr=0.1, max_iter=8, line_search_fn="strong_wolfe")

        def closure(case=case, mll=mll, optimizer=optimizer, indices=indices) -> Tensor:
            optimizer.zero_grad()
            loss = -mll(case.model(case.x), case.y, indices=indices)
            loss.backward()
            return loss

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step(closure)
        assert sum("as in a line search" in str(each.message) for each in told) == (indices is None)


def test_l_bfgs_on_all_rows_at_once_is_not_warned_of() -> None:
    case = feature_case(KERNELS["fourier"]())
    mll = gpi.mlls.MinibatchMarginalLogLikelihood(case.likelihood, case.model, batch_size=len(case.y), generator=0)
    optimizer = torch.optim.LBFGS(case.model.parameters(), lr=0.1, max_iter=8, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -mll(case.model(case.x), case.y)
        loss.backward()
        return loss

    before = closure().item()
    optimizer.step(closure)
    assert closure().item() < before


@pytest.mark.parametrize("method", METHODS)
def test_training_in_evaluation_mode(method: str) -> None:
    """Such as BoTorch leaves behind; the usual `model.train()` does not reach the marginal log likelihood."""
    case, mll = started(method)
    mll.eval()
    case.model.train()
    with pytest.warns(BiasWarning, match=r"evaluation mode: call mll\.train\(\)"):
        train(case, mll, list(mll.parameters()))
    mll.train()
    train(case, mll, list(mll.parameters()))  # no warning


@pytest.mark.parametrize("method", METHODS)
def test_one_datum_one_feature(method: str) -> None:
    x, y = torch.tensor([[0.3]]).double(), torch.tensor([1.2]).double()
    likelihood = GaussianLikelihood()
    model = Regression(x, y, likelihood, kernels.LinearKernel()).double()
    mll = METHODS[method](likelihood, model)
    value = mll(model(x), y)
    variance = 0.09 * model.covar_module.variance.item() + likelihood.noise.item()
    expected = torch.distributions.Normal(torch.tensor(0.0).double(), variance**0.5).log_prob(y[0])
    torch.testing.assert_close(value.detach(), expected)
    value.backward()
    assert mll.posterior()(torch.zeros(0, 1).double()).mean.shape == (0,)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_duplicates_dead_features_and_tiny_noise_train_without_nan(method: str, dtype: torch.dtype) -> None:
    x, y = data(60, dtype=dtype)
    x[1::2] = x[::2]
    extractor = torch.nn.Sequential(network(), torch.nn.ReLU())
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
    model = Regression(x, y, likelihood, gpi.kernels.DeepFeatureKernel(extractor, kernels.LinearKernel())).to(dtype)
    extractor[0][2].bias.data[0] = -1e3  # a dead unit
    likelihood.noise = 1e-5
    mll = METHODS[method](likelihood, model, batch_size=8, generator=0)
    optimizer = torch.optim.Adam(mll.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in mll.parameters())
    assert torch.isfinite(mll.exact_value())


@pytest.mark.parametrize("method", METHODS)
def test_frozen_parameters_stay(method: str) -> None:
    case, mll = started(method)
    case.model.covar_module.raw_outputscale.requires_grad_(False)
    case.likelihood.noise_covar.raw_noise.requires_grad_(False)
    mll.zero_grad()
    mll(case.model(case.x), case.y).backward()
    assert not case.model.covar_module.raw_outputscale.grad
    assert case.model.covar_module.base_kernel.raw_lengthscale.grad.abs().max() > 0
    for parameter in case.model.parameters():
        parameter.requires_grad_(False)
    mll(case.model(case.x), case.y)  # nothing to train, and still a value

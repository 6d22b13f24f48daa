"""Every refusal names its reason, comes before any work, and leaves parameters and warm start as they were."""

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.operators import ConstantDiagLinearOperator

import gpy_iterative as gpi
from tests.exact.gaussian_models import CASES, Case, DeepKernelRegression, Regression, data, regression

MLLS = [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood]
TRUNCATING = [gpi.mlls.RussianRouletteMarginalLogLikelihood, gpi.mlls.RFFMarginalLogLikelihood]
ITERATIVE = gpi.solvers.ConjugateGradients(tolerance=1e-4)


def case_and_mll(mll_class: type = MLLS[0], **options) -> tuple[Case, gpytorch.mlls.MarginalLogLikelihood]:
    case = regression(kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3)), n=30)
    return case, mll_class(case.likelihood, case.model, **({"solver": ITERATIVE, "generator": 0} | options))


def test_bad_target_values() -> None:
    case, mll = case_and_mll()
    y = case.y.clone()
    y[7] = torch.nan
    with pytest.raises(ValueError, match=r"target\[7\] is nan"):
        mll(case.model(case.x), y)
    y[7] = torch.inf
    with gpytorch.settings.observation_nan_policy("mask"), pytest.raises(ValueError, match=r"target\[7\] is inf"):
        mll(case.model(case.x), y)
    with gpytorch.settings.observation_nan_policy("fill"), pytest.raises(ValueError, match="fill"):
        mll(case.model(case.x), case.y)


@pytest.mark.parametrize("mll_class", [*MLLS, *TRUNCATING])
def test_no_data_or_all_missing(mll_class: type) -> None:
    x, y = data(30)
    for size in (0, 30):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Regression(x[:size], y[:size], likelihood, kernels.RBFKernel()).double()
        mll = mll_class(likelihood, model, generator=0)
        with gpytorch.settings.observation_nan_policy("mask"), pytest.raises(ValueError, match="no observed target"):
            mll(model(x[:size]), torch.full_like(y[:size], torch.nan))


@pytest.mark.parametrize("size", [0, 30])
def test_predictions_from_no_data_or_all_missing(size: int) -> None:
    x, y = data(30)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x[:size], torch.full_like(y[:size], torch.nan), likelihood, kernels.RBFKernel()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    with gpytorch.settings.observation_nan_policy("mask"), pytest.raises(ValueError, match="no observed target"):
        mll.posterior()(x)


def test_targets_that_are_no_tensor() -> None:
    case, mll = case_and_mll()
    for target in (None, case.y.tolist()):
        with pytest.raises(ValueError, match=f"must be a tensor.*{type(target).__name__}"):
            mll(case.model(case.x), target)


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.3), torch.nn.RReLU()])
def test_layers_of_chance(layer: torch.nn.Module) -> None:
    """Values would be noisy while their standard error is zero."""
    x, y = data(30)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = DeepKernelRegression(x, y, likelihood).double()
    model.network.append(layer)
    mll = MLLS[0](likelihood, model, generator=0)
    for evaluate in (lambda: mll(model(x), y), lambda: gpi.fit(mll, max_steps=2, progress=False)):
        with pytest.raises(ValueError, match=f"{type(layer).__name__} in training mode"):
            evaluate()
    layer.eval()
    mll(model(x), y)
    gpi.fit(mll, max_steps=2, progress=False, callback=lambda row: mll.posterior())
    assert model.training
    assert not layer.training


def test_bad_inputs() -> None:
    case, mll = case_and_mll()
    x = case.x.clone()
    x[4, 1] = torch.inf
    case.model.set_train_data(x, case.y)
    with pytest.raises(ValueError, match=r"train_inputs\[4, 1\] is inf"):
        mll(case.model(x), case.y)


def test_nan_inputs_are_named_when_the_mll_is_made() -> None:
    # Later GPyTorch says that they are not the training inputs: NaN does not equal itself.
    x, y = data(30)
    x[4, 1] = torch.nan
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    for mll_class in MLLS:
        with pytest.raises(ValueError, match=r"train_inputs\[4, 1\] is nan"):
            mll_class(likelihood, model)


@pytest.mark.parametrize("mll_class", MLLS)
@pytest.mark.parametrize("solver", [None, ITERATIVE, gpi.solvers.AlternatingProjections(block_size=8)])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e25), (torch.float64, 1e160), (torch.float64, 1e200)])
def test_overflow_is_an_error_and_leaves_the_warm_start(
    mll_class: type, solver: gpi.solvers.Solver | None, dtype: torch.dtype, scale: float
) -> None:
    case = regression(kernels.ScaleKernel(kernels.RBFKernel()), n=30, dtype=dtype)
    mll = mll_class(case.likelihood, case.model, solver=solver, generator=0)
    mll(case.model(case.x), case.y)
    before, report = mll.training_state(), mll.report
    with pytest.raises(gpi.errors.NonFiniteError, match=r"not finite|is (inf|nan)"):
        mll(case.model(case.x), scale * case.y)
    after = mll.training_state()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert mll.report is report


@pytest.mark.parametrize("mll_class", MLLS)
@pytest.mark.parametrize("solver", [None, ITERATIVE])
def test_lengthscale_that_underflows_to_zero(mll_class: type, solver: gpi.solvers.Solver | None) -> None:
    case, mll = case_and_mll(mll_class, solver=solver)
    mll(case.model(case.x), case.y)
    case.model.covar_module.base_kernel.raw_lengthscale.data.fill_(-1e4)
    with pytest.raises(gpi.errors.NonFiniteError, match="hyperparameters"):
        mll(case.model(case.x), case.y)


@pytest.mark.parametrize("mll_class", MLLS)
@pytest.mark.parametrize("solver", [None, ITERATIVE])
def test_training_on_after_a_posterior_asks_for_train_mode(mll_class: type, solver: gpi.solvers.Solver | None) -> None:
    case, mll = case_and_mll(mll_class, solver=solver)
    value = mll(case.model(case.x), case.y)
    mll.posterior()
    with (
        pytest.warns(gpytorch.utils.warnings.GPInputWarning),
        pytest.raises(RuntimeError, match=r"model\.train\(\)"),
    ):
        mll(case.model(case.x), case.y)
    mll.train()
    torch.testing.assert_close(mll(case.model(case.x), case.y), value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mll_class", MLLS)
@pytest.mark.parametrize("solver", [None, ITERATIVE])
def test_the_models_own_posterior_is_no_prior(mll_class: type, solver: gpi.solvers.Solver | None) -> None:
    case, mll = case_and_mll(mll_class, solver=solver)
    value = mll(case.model(case.x), case.y).item()
    case.model.eval()
    with (
        pytest.warns(gpytorch.utils.warnings.GPInputWarning),
        pytest.raises(RuntimeError, match=r"model\.train\(\)"),
    ):
        mll(case.model(case.x), case.y)
    with gpytorch.settings.prior_mode():
        prior = case.model(case.x)
    for other in (prior, case.model.forward(case.x)):
        assert mll(other, case.y).item() == pytest.approx(value, abs=1e-2)


@pytest.mark.parametrize("mll_class", [*MLLS, gpi.mlls.VariationalFeatureMarginalLogLikelihood])
@pytest.mark.parametrize(
    "likelihood",
    [
        gpytorch.likelihoods.GaussianLikelihood(),
        gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((30,), 0.1)),
        gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((30,), 0.1), learn_additional_noise=True),
    ],
)
def test_the_distribution_of_the_targets_is_no_prior(
    mll_class: type, likelihood: gpytorch.likelihoods.Likelihood
) -> None:
    """The noise counted twice, silently."""
    x, y = data(30)
    likelihood = likelihood.double()
    model = Regression(x, y, likelihood, kernels.LinearKernel()).double()
    mll = mll_class(likelihood, model)
    with pytest.raises(RuntimeError, match="noise would count twice"):
        mll(likelihood(model(x)), y)
    mll(model(x), y)


@pytest.mark.parametrize("mll_class", MLLS)
def test_the_likelihood_comes_first(mll_class: type) -> None:
    case, _ = case_and_mll(mll_class)
    with pytest.raises(TypeError, match=r"comes first: \w+\(likelihood, model\)"):
        mll_class(case.model, case.model.likelihood)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")  # torch's: a beta state, or no checks of invariants
def test_sparse_inputs(layout: torch.layout) -> None:
    case, mll = case_and_mll()
    x = case.x.to_sparse(layout=layout)
    model = Regression(x, case.y, case.likelihood, kernels.RBFKernel()).double()
    for mll_class in MLLS:
        with pytest.raises(ValueError, match=r"train_inputs must be a dense tensor.*train_inputs\.to_dense"):
            mll_class(case.likelihood, model)
    with pytest.raises(ValueError, match=r"x must be a dense tensor.*x\.to_dense"):
        mll.posterior()(x)


def test_arrays_for_test_inputs() -> None:
    case, mll = case_and_mll()
    with pytest.raises(ValueError, match="tensors, got ndarray"):
        mll.posterior()(case.x.numpy())


@pytest.mark.parametrize("solver", [None, ITERATIVE])
def test_a_negative_seed_is_a_seed(solver: gpi.solvers.Solver | None) -> None:
    case, mll = case_and_mll(generator=-1, solver=solver)
    mll(case.model(case.x), case.y)
    assert mll.posterior()(case.x[:2]).variance.shape == (2,)


def test_target_of_shape_n_by_1_is_not_n_problems() -> None:
    case, mll = case_and_mll()
    with pytest.raises(ValueError, match=r"squeeze"):
        mll(case.model(case.x), case.y.unsqueeze(-1))


def test_target_of_another_length() -> None:
    case, mll = case_and_mll()
    with pytest.raises(ValueError, match=r"\(30,\).*\(29,\)"):
        mll(case.model(case.x), case.y[:-1])


def test_target_of_another_dtype() -> None:
    case, mll = case_and_mll()
    with pytest.raises(ValueError, match=r"float64.*float32.* Use target\.to\('cpu', torch\.float64\), or"):
        mll(case.model(case.x), case.y.float())


def test_inputs_of_another_dtype_than_the_kernel() -> None:
    x, y = data(30)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, kernels.RBFKernel())  # float32 parameters, float64 data
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    with pytest.raises(ValueError, match=r"inputs are like the target: use model\.to\('cpu', torch\.float64\)"):
        mll(model(x), y)


@pytest.mark.parametrize("mll_class", MLLS)
def test_non_gaussian_likelihood(mll_class: type) -> None:
    case, _ = case_and_mll()
    with pytest.raises(gpi.errors.UnsupportedLikelihoodError, match="BernoulliLikelihood"):
        mll_class(gpytorch.likelihoods.BernoulliLikelihood(), case.model)


def test_model_that_is_no_exact_gp() -> None:
    with pytest.raises(TypeError, match="ExactGP"):
        gpi.mlls.HutchinsonMarginalLogLikelihood(gpytorch.likelihoods.GaussianLikelihood(), torch.nn.Linear(1, 1))
    case, _ = case_and_mll()
    with pytest.raises(TypeError, match=r"got OptimizedModule\. Compile only the network"):
        gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, torch.compile(case.model, backend="eager"))


def test_fixed_noise_of_another_size() -> None:
    x, y = data(30)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise=torch.full((20,), 0.1).double())
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    with pytest.warns(gpytorch.utils.warnings.GPInputWarning), pytest.raises(ValueError, match="noise"):
        mll(model(x), y)


def test_fixed_noise_that_is_one_number() -> None:
    x, y = data(30)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise=torch.tensor(0.1).double())
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    for use in (lambda: mll(model(x), y), mll.posterior):
        with pytest.raises(ValueError, match="one number for its fixed noise: it needs one noise variance for every"):
            use()
    model.train()
    with pytest.raises(TypeError, match=r"noise must be None or a Tensor .*, got 0\.1"):
        mll(model(x), y, noise=0.1)


def test_tasks_of_the_likelihood_that_the_model_has_not() -> None:
    x, y = data(30)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood.double(), model)
    for call in (lambda: mll(model(x), y), lambda: gpi.fit(mll, progress=False), mll.posterior):
        with pytest.raises(ValueError, match=r"has 2 tasks, the model's output the shape \(30,\)"):
            call()


def test_a_kernel_of_derivatives_whose_mean_has_none() -> None:
    x, y = data(30)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Regression(x, y, likelihood, kernels.RBFKernelGrad()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    for call in (lambda: mll(model(x), y), lambda: gpi.fit(mll, progress=False), mll.posterior):
        with pytest.raises(
            ValueError, match=r"mean of 30 values, but its covariance has 120 rows: .* ConstantMeanGrad"
        ):
            call()


class OrderOfTasks(Regression):
    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultitaskMultivariateNormal:
        return gpytorch.distributions.MultitaskMultivariateNormal.from_independent_mvns([super().forward(x)] * 2)


class NoiseOfAllTasks(gpytorch.likelihoods.GaussianLikelihood):
    def _shaped_noise_covar(self, shape: torch.Size, *_: object) -> ConstantDiagLinearOperator:
        return ConstantDiagLinearOperator(self.noise, shape[-2:].numel())


@pytest.mark.parametrize(
    "likelihood", [gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2), NoiseOfAllTasks()]
)
def test_an_output_in_the_order_of_tasks(likelihood: gpytorch.likelihoods.Likelihood) -> None:
    """It could be trained, but there was no prediction."""
    x, y = data(30)
    model = OrderOfTasks(x, torch.stack([y, -y], -1), likelihood, kernels.RBFKernel()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood.double(), model)
    for call in (lambda: mll(model(x), model.train_targets), lambda: gpi.fit(mll, progress=False), mll.posterior):
        with pytest.raises(ValueError, match="in place of from_independent_mvns take from_batch_mvn"):
            call()


def test_noise_of_tasks_that_is_singular() -> None:
    """Alternating projections ended as converged, with a value far from the exact one."""
    case = CASES["multitask-low-rank-noise"]()
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, rank=1, has_global_noise=False).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, case.model)
    with pytest.raises(ValueError, match="The noise of 2 tasks has rank=1 and no global noise"):
        mll(case.model(case.x), case.y)


def test_a_prior_of_the_noise_of_tasks() -> None:
    """GPyTorch gives `task_prior` a method, not the matrix; its marginal likelihood and `gpi.fit` failed."""
    case = CASES["multitask-low-rank-noise"]()
    prior = gpytorch.priors.LKJCovariancePrior(2, 1.5, gpytorch.priors.UniformPrior(0.05, 3.0))
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, rank=1, task_prior=prior)
    with pytest.raises(ValueError, match=r"no tensor, as GPyTorch's does with task_prior[\s\S]*register_prior"):
        gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, case.model)
    case.likelihood.register_prior("task_prior", prior, lambda own: own._eval_covar_matrix())  # as the message says
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=gpi.solvers.Cholesky())
    expected = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)(case.model(case.x), case.y)
    torch.testing.assert_close(mll(case.model(case.x), case.y), expected)


def test_a_prior_of_a_function() -> None:
    case = CASES["rbf"]()
    case.likelihood.register_prior("own_prior", gpytorch.priors.GammaPrior(2.0, 2.0), lambda own: lambda: own.noise)
    with pytest.raises(ValueError, match="own_prior no tensor: register it with a function that returns one"):
        gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)


def test_a_prior_of_a_number() -> None:
    case = CASES["rbf"]()
    case.likelihood.register_prior("noise_prior", gpytorch.priors.GammaPrior(2.0, 2.0), lambda own: own.noise.item())
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=gpi.solvers.Cholesky())
    expected = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)(case.model(case.x), case.y)
    torch.testing.assert_close(mll(case.model(case.x), case.y), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0, -1.0])
def test_bad_noise(bad: float) -> None:
    x, y = data(30)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise=torch.full((30,), 0.1).double())
    likelihood.noise_covar.noise[5] = bad
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    with pytest.raises(ValueError, match=r"noise\[5\]"):
        mll(model(x), y)


def test_non_finite_hyperparameter_is_a_nan_error_and_leaves_the_warm_start() -> None:
    case, mll = case_and_mll()
    mll(case.model(case.x), case.y)
    before = mll.training_state()
    good = case.model.covar_module.base_kernel.raw_lengthscale.data.clone()
    case.model.covar_module.base_kernel.raw_lengthscale.data[0, 1] = torch.nan
    with pytest.raises(gpi.errors.NonFiniteError, match="raw_lengthscale"):
        mll(case.model(case.x), case.y)
    after = mll.training_state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    case.model.covar_module.base_kernel.raw_lengthscale.data = good
    assert torch.isfinite(mll(case.model(case.x), case.y))


def test_a_value_set_to_the_bound_of_its_constraint() -> None:
    """GPyTorch accepts it, and its raw value is infinite: no learning rate helps."""
    case, mll = case_and_mll()
    case.likelihood.noise = case.likelihood.noise_covar.raw_noise_constraint.lower_bound
    with pytest.raises(gpi.errors.NonFiniteError, match=r"raw_noise is not finite.*set to a bound of its constraint"):
        mll(case.model(case.x), case.y)


@pytest.mark.parametrize(
    ("mll_class", "options"),
    [
        (MLLS[0], {"num_probes": 0}),
        (MLLS[0], {"num_probes": 1.5}),
        (MLLS[0], {"probes": "cauchy"}),
        (MLLS[0], {"warm_start": "hot"}),
        (MLLS[1], {"num_probes": 0}),
        (MLLS[1], {"num_frequencies": 0}),
        (MLLS[1], {"num_frequencies": 2.5}),
        (MLLS[1], {"prior": "improper"}),
        (MLLS[1], {"warm_start": "hot"}),
    ],
)
def test_options_outside_their_range(mll_class: type, options: dict) -> None:
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        case_and_mll(mll_class, **options)


@pytest.mark.parametrize("mll_class", MLLS)
@pytest.mark.parametrize(
    "options", [{"solver": "cg"}, {"solver": gpi.solvers.ConjugateGradients}, {"products": "tiles"}], ids=str
)
def test_a_name_or_a_class_is_no_object(mll_class: type, options: dict) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be None or a"):
        case_and_mll(mll_class, **options)
    case, _ = case_and_mll()
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be None or a"):
        gpi.prediction.PathwisePosterior(case.model, case.likelihood, **options)


@pytest.mark.parametrize("mll_class", MLLS)
@pytest.mark.parametrize("solver", [None, ITERATIVE, gpi.solvers.AlternatingProjections()])
def test_one_datum_one_dimension_one_probe(mll_class: type, solver: gpi.solvers.Solver | None) -> None:
    x, y = torch.tensor([[0.3]]).double(), torch.tensor([1.2]).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))).double()
    mll = mll_class(likelihood, model, num_probes=1, solver=solver, generator=0)
    value = mll(model(x), y)
    variance = (model.covar_module.outputscale + likelihood.noise).item()
    expected = -0.5 * (1.44 / variance + torch.log(torch.tensor(2 * torch.pi * variance)).item())
    assert abs(value.item() - expected) < 1e-3
    value.backward()


@pytest.mark.parametrize("mll_class", MLLS)
def test_duplicate_rows_and_tiny_noise_never_give_nan(mll_class: type) -> None:
    x, y = data(60, dtype=torch.float32)
    x[1::2] = x[::2]
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-9))
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernels.RBFKernel()))
    likelihood.noise = 1e-6
    mll = mll_class(likelihood, model, solver=gpi.solvers.ConjugateGradients(max_epochs=50), generator=0)
    value = mll(model(x), y)
    value.backward()
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
    assert torch.isfinite(value)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (gpi.mlls.HutchinsonMarginalLogLikelihood, {"warm_start": 0}, "warm_start"),
        (gpi.mlls.PathwiseMarginalLogLikelihood, {"corrected": "no"}, "corrected"),
        (gpi.mlls.PathwiseMarginalLogLikelihood, {"prior": "exact", "num_frequencies": 10}, "leave it out"),
        (gpi.mlls.RussianRouletteMarginalLogLikelihood, {"resample": "no"}, "resample"),
        (gpi.mlls.SingleSampleRFFMarginalLogLikelihood, {"resample": 1}, "resample"),
    ],
)
def test_options_that_are_no_choices(make: type, options: dict, message: str) -> None:
    model = regression(kernels.RBFKernel(), n=8).model
    with pytest.raises(ValueError, match=message):
        make(model.likelihood, model, **options)


def test_states_that_are_none() -> None:
    case = regression(kernels.RBFKernel(), n=8)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, solver=gpi.solvers.ConjugateGradients(), generator=0
    )
    mll(case.model(case.x), case.y)
    state = mll.training_state()
    for changed in ({"generator": state["generator"][:-1]}, {"like": "float"}):
        with pytest.raises(ValueError, match="training_state"):
            mll.load_training_state(state | changed)
    assert all(torch.equal(tensor, state[name]) for name, tensor in mll.training_state().items())


def test_a_batch_of_kernels_meets_one_mean_and_target() -> None:
    case = regression(kernels.RBFKernel(), n=20)
    batch = torch.Size([2])
    kernel = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=batch), batch_shape=batch).double()
    kernel.outputscale = torch.tensor([0.5, 2.0])
    model = Regression(case.x, case.y, case.likelihood, kernel).double()
    expected = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, model)(model(case.x), case.y)
    for mll_class in (gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood):
        found = mll_class(case.likelihood, model)(model(case.x), case.y)
        torch.testing.assert_close(found, expected)


def test_probes_that_are_no_name() -> None:
    with pytest.raises(ValueError, match=r"probes must be one of .* got \['gaussian'\]"):
        case_and_mll(probes=["gaussian"])

"""The Russian-roulette likelihood: exact expectations by injected draws, Monte Carlo, and what it reports."""

import copy
import dataclasses
import functools
import itertools
import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator import to_linear_operator
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.truncation import AutomaticTruncation, ExponentialTruncation, FixedTruncation
from tests.exact.gaussian_models import CASES, Case, Regression, data, regression
from tests.exact.test_estimator import ANY_KERNEL, exact, monte_carlo
from tests.exact.test_exact import value_and_gradients
from tests.monte_carlo import assert_mean_within, assert_within

RussianRoulette = gpi.mlls.RussianRouletteMarginalLogLikelihood
TruncatedCG = gpi.mlls.TruncatedCGMarginalLogLikelihood
RANK = 4


def roulette(case: Case, **options) -> gpi.mlls.RussianRouletteMarginalLogLikelihood:
    defaults = {"truncation": ExponentialTruncation(6, 0.15), "preconditioner": PivotedCholesky(RANK), "generator": 0}
    return RussianRoulette(case.likelihood, case.model, **(defaults | options))


def smooth_case(dtype: torch.dtype = torch.float64) -> Case:
    """Sixty data and a condition number of some hundreds."""
    case = regression(kernels.ScaleKernel(kernels.RBFKernel()), n=60, dtype=dtype)
    case.model.covar_module.base_kernel.lengthscale = 1.5
    case.likelihood.noise = 0.05
    return case


class ThreeValues:
    """J in {2, 6, 150} with probabilities 1/2, 1/4, 1/4."""

    support = (2, 6, 150)
    probabilities = (0.5, 0.25, 0.25)

    def log_survival(self, steps: Tensor) -> Tensor:
        survival = torch.where(steps <= 2, 1.0, torch.where(steps <= 6, 0.5, 0.25)).double()
        return torch.where(steps <= 150, survival.log(), -math.inf)

    def sample(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        picks = torch.multinomial(torch.tensor(self.probabilities), math.prod(size), True, generator=generator)
        return torch.tensor(self.support)[picks].reshape(size)


def inject(mll: gpytorch.mlls.MarginalLogLikelihood, case: Case, stops: tuple[int, int], probe_stop: int) -> None:
    """Freezes the draws: J of the targets, J of the probes, and probes that enumerate a root of their covariance."""
    mll(case.model(case.x), case.y)
    state, n = mll.training_state(), len(case.y)
    count = n + RANK
    state["series.probes.base"] = count**0.5 * torch.eye(count, dtype=case.y.dtype)
    state["series.target_stops"] = torch.tensor(stops)
    state["series.probe_stops"] = torch.full((count,), probe_stop)
    mll.load_training_state(state)


def test_enumerated_gradient_and_value_are_exact() -> None:
    """The sheet's identities, through the likelihood itself: both truncations and all probes, enumerated."""
    case, distribution = smooth_case(), ThreeValues()
    expected, expected_gradients = exact(case)
    mll = roulette(case, truncation=distribution, num_probes=len(case.y) + RANK, resample=False)
    value, gradients = torch.zeros_like(expected), {name: 0.0 for name in expected_gradients}
    pairs = zip(distribution.support, distribution.probabilities, strict=True)
    for (first, p), (second, q) in itertools.product(list(pairs), repeat=2):
        # The probes' term is linear in their own truncation: it takes the first one's, for its marginal.
        inject(mll, case, (first, second), first)
        with warnings.catch_warnings(action="ignore", category=gpi.errors.VarianceWarning):
            term, term_gradients = value_and_gradients(mll, case)
        assert mll.report.truncation.target_steps.tolist() == [first, second]
        value += p * q * term
        for name, gradient in term_gradients.items():
            gradients[name] = gradients[name] + p * q * gradient
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-8)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=1e-8)


def test_with_one_draw_for_both_factors_the_enumerated_gradient_is_wrong() -> None:
    case, distribution = smooth_case(), ThreeValues()
    _, expected = exact(case)
    mll = roulette(case, truncation=distribution, num_probes=len(case.y) + RANK, resample=False)
    gradients = {name: 0.0 for name in expected}
    for stop, p in zip(distribution.support, distribution.probabilities, strict=True):
        inject(mll, case, (stop, stop), stop)
        with warnings.catch_warnings(action="ignore", category=gpi.errors.VarianceWarning):
            for name, gradient in value_and_gradients(mll, case)[1].items():
                gradients[name] = gradients[name] + p * gradient
    noise = "likelihood.noise_covar.raw_noise"
    assert (gradients[noise] - expected[noise]).abs() > 0.1 * expected[noise].abs()


@pytest.mark.parametrize("truncation", [ExponentialTruncation(500, 0.05), ExponentialTruncation(200, 0.0, 210)])
@pytest.mark.parametrize("name", ["matern-3/2", "fixed-noise", "priors", "sum-in-forward", "deep", "multitask"])
def test_converged_solves_and_enumerated_probes_give_the_exact_gradient(name: str, truncation) -> None:
    """The surrogate, mean and noise included, to the solves' own accuracy."""
    case = CASES[name]()
    expected, expected_gradients = exact(case)
    n = case.y.numel()
    mll = roulette(case, truncation=truncation, num_probes=n, preconditioner=None, resample=False)
    mll(case.model(case.x), case.y)
    state = mll.training_state()
    state["series.probes.base"] = n**0.5 * torch.eye(n, dtype=torch.float64)
    mll.load_training_state(state)
    value, gradients = value_and_gradients(mll, case)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-9)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[parameter], rtol=1e-7, atol=1e-9)
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
    assert float(mll.report.truncation.relative_variance) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY_KERNEL)
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
def test_gradient_is_unbiased(name: str) -> None:
    case = CASES[name]()
    _, expected = exact(case)
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    mll = roulette(case, num_truncations=8, num_probes=40)  # few runs of many draws cost less
    for parameter, samples in monte_carlo(case, mll, 16).items():
        assert_mean_within(samples, expected[parameter], max_sem=0.3 * scale, floor=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"probe_truncation": "shared"}, {"preconditioner": None}, {"num_truncations": 16, "num_probes": 30}],
)
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
def test_value_and_gradient_are_unbiased_to_a_fortieth(options: dict) -> None:
    case = smooth_case()
    expected, expected_gradients = exact(case)
    options = {"num_probes": 60, "num_truncations": 8} | options
    mll = roulette(case, truncation=ExponentialTruncation(15, 0.05), **options)
    values, samples = [], {}
    for _ in range(24):
        value, gradients = value_and_gradients(mll, case)
        values.append(value)
        for name, gradient in gradients.items():
            samples.setdefault(name, []).append(gradient)
    values = torch.stack(values)
    assert_mean_within(values, expected, max_sem=0.025 * abs(float(expected)))
    scale = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradients in samples.items():
        assert_mean_within(torch.stack(gradients), expected_gradients[name], max_sem=0.025 * scale, floor=1e-9)
    # A baseline of as many steps as these take on average has another mean.
    biased = TruncatedCG(case.likelihood, case.model, num_steps=6, num_probes=24, preconditioner=None, generator=0)
    values = torch.stack([value_and_gradients(biased, case)[0] for _ in range(20)])
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean_within(values, expected, max_sem=math.inf)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
def test_value_has_the_error_it_reports() -> None:
    case = smooth_case()
    expected, _ = exact(case)
    values, sems = [], []
    mll = roulette(case, truncation=ExponentialTruncation(10, 0.1))
    for _ in range(30):
        values.append(mll(case.model(case.x), case.y).detach())
        sems.append(mll.report.value_sem)
    spread = (torch.stack(values) - expected).square().mean().sqrt()
    assert 0.3 * spread <= torch.stack(sems).square().mean().sqrt() <= 3 * spread


@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
def test_the_reported_error_of_the_fit_is_that_of_enumerated_truncations() -> None:
    """Probes that are all alike have no error of their own; the longest run sees all terms."""
    case, distribution = smooth_case(), ThreeValues()
    mll = roulette(case, truncation=distribution, num_probes=2, preconditioner=None, resample=False)
    mll(case.model(case.x), case.y)
    state, values = mll.training_state(), []
    state["series.probes.base"] = torch.ones(len(case.y), 2, dtype=torch.float64)
    state["series.probe_stops"] = torch.tensor([150, 150])
    for stop in distribution.support:
        state["series.target_stops"] = torch.tensor([stop, stop])
        mll.load_training_state(state)
        values.append(mll(case.model(case.x), case.y).detach())
    probabilities, values = torch.tensor(distribution.probabilities).double(), torch.stack(values)
    variance = probabilities @ (values - probabilities @ values).square()
    torch.testing.assert_close(mll.report.value_sem, (variance / 2).sqrt(), rtol=1e-6, atol=0)  # of two draws


def full_matrix(case: Case) -> Tensor:
    covariance = case.model(case.x).covariance_matrix.detach()
    return covariance + case.likelihood.noise.detach() * torch.eye(len(case.y), dtype=case.y.dtype)


def test_truncated_value_is_too_good_in_fit_and_too_large_in_complexity() -> None:
    """The quadratic form from below, the log-determinant from above."""
    case = smooth_case()
    n, dense = len(case.y), full_matrix(case)
    mean = case.model.mean_module(case.x).detach()
    residual = case.y - mean
    fit = float(-0.5 * residual @ torch.linalg.solve(dense, residual)) / n
    complexity = float(-0.5 * torch.linalg.slogdet(dense)[1]) / n - 0.5 * math.log(2 * math.pi)
    for steps in (3, 8):
        mll = TruncatedCG(
            case.likelihood, case.model, num_steps=steps, num_probes=n, preconditioner=None, resample=False, generator=0
        )
        mll(case.model(case.x), case.y)
        probes = {"series.probes.base": n**0.5 * torch.eye(n, dtype=torch.float64)}
        mll.load_training_state(mll.training_state() | probes)
        without_fit = float(mll(case.model(case.x), mean).detach())
        assert without_fit < complexity - 1e-3
        assert float(mll(case.model(case.x), case.y).detach()) - without_fit > fit + 1e-3


@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
def test_float32_agrees_with_float64() -> None:
    results = {}
    for dtype in (torch.float32, torch.float64):
        case = smooth_case(dtype)
        mll = roulette(case, truncation=ExponentialTruncation(30, 0.1))
        value, gradients = value_and_gradients(mll, case)
        assert value.dtype == dtype
        results[dtype] = torch.cat([value[None], *(g.reshape(-1) for g in gradients.values())]).double()
    torch.testing.assert_close(results[torch.float32], results[torch.float64], rtol=0.05, atol=0.02)


def test_report_of_the_draws() -> None:
    case = smooth_case()
    mll = roulette(case, truncation=ExponentialTruncation(12, 0.2), num_truncations=3, num_probes=5)
    mll(case.model(case.x), case.y)
    report = mll.report.truncation
    assert report.truncation == ExponentialTruncation(12, 0.2, 120)
    assert report.target_steps.shape == (3,)
    assert report.probe_steps.shape == (5,)
    assert report.steps[0] == report.target_steps.max()
    assert (report.steps[1:] <= report.probe_steps).all()
    assert not report.converged[0]
    assert mll.report.status is gpi.solvers.SolveStatus.TRUNCATED
    assert mll.report.iterations == int(report.steps.max())
    assert mll.report.epochs == mll.report.iterations
    assert 0 < mll.report.residual_targets < 1
    assert 0 <= float(report.relative_variance) < 1
    assert 0.05 < float(report.decay_rate) < 1
    assert "truncated" in str(mll.report)
    shared = roulette(case, probe_truncation="shared", num_probes=5)
    shared(case.model(case.x), case.y)
    assert (shared.report.truncation.probe_steps == shared.report.truncation.target_steps[0]).all()


def test_a_truncation_too_steep_for_the_system_is_told_once() -> None:
    case = smooth_case()
    case.likelihood.noise = 1e-3
    mll = roulette(case, truncation=ExponentialTruncation(3, 1.5), preconditioner=None)
    with pytest.warns(gpi.errors.VarianceWarning, match=r"rate[\s\S]*AutomaticTruncation"):
        mll(case.model(case.x), case.y)
    mll(case.model(case.x), case.y)  # a second warning would be an error here


@pytest.mark.parametrize(
    ("truncation", "category", "said"),
    [
        (ExponentialTruncation(10, 0.05, 10), gpi.errors.BiasWarning, r"10 steps.*residual.*biased"),
        (FixedTruncation(2), gpi.errors.BiasWarning, r"2 steps.*residual.*biased"),
        (ExponentialTruncation(3, 10.0), gpi.errors.VarianceWarning, "without bound.*bias"),
    ],
)
def test_a_series_that_ends_unconverged_is_told_to_be_biased(truncation, category: type, said: str) -> None:
    case = smooth_case()
    case.likelihood.noise = 1e-3
    mll = roulette(case, truncation=truncation, preconditioner=None)
    with pytest.warns(category, match=said):
        mll(case.model(case.x), case.y)


def test_a_series_that_is_solved_where_it_ends_is_not() -> None:
    case = smooth_case()
    case.likelihood.noise = 1.0
    mll = roulette(case, truncation=FixedTruncation(8))
    mll(case.model(case.x), case.y)  # a warning would be an error here
    assert not mll.report.truncation.converged[0]
    assert mll.report.residual_targets < 0.01


def test_terms_that_do_not_fall_are_told_without_a_rate() -> None:
    """Where terms do not fall there is no rate to advise."""
    case = smooth_case()
    case.likelihood.noise = 1e-3
    mll = roulette(case, truncation=ExponentialTruncation(8, 3.0), preconditioner=None)
    with pytest.warns(gpi.errors.VarianceWarning, match=r"in \d+ steps its terms do not fall. Raise min_steps"):
        mll(case.model(case.x), case.y)


def test_a_rate_that_leaves_no_random_step_is_refused_before_anything_is_drawn() -> None:
    case = smooth_case(torch.float32)
    mll = roulette(case, truncation=ExponentialTruncation(10, 14.0))
    before = mll.training_state()
    with pytest.raises(ValueError, match=r"rate must be at most 13\.6 in torch\.float32, got 14"):
        mll(case.model(case.x), case.y)
    assert all(torch.equal(before[key], value) for key, value in mll.training_state().items())


def test_automatic_truncation_follows_the_last_step_alone() -> None:
    case = smooth_case()
    mll = roulette(case, truncation=AutomaticTruncation(), preconditioner=PivotedCholesky(RANK))
    mll(case.model(case.x), case.y)
    assert mll.report.truncation.truncation.min_steps == 80
    state = mll.training_state()
    chosen = AutomaticTruncation().choose(state["decay.energies"])
    assert chosen.min_steps < 80
    for seed in (0, 1):  # whatever is drawn now
        fresh = roulette(case, truncation=AutomaticTruncation(), generator=seed)
        fresh.load_training_state({**state, "generator": torch.Generator().manual_seed(seed).get_state()})
        fresh(case.model(case.x), case.y)
        assert fresh.report.truncation.truncation == chosen.within(60, torch.float64)
    # Targets that are the mean have no decay to show.
    mll(case.model(case.x), case.model.mean_module(case.x).detach())
    mll(case.model(case.x), case.y)
    assert mll.report.truncation.truncation.min_steps == 80
    x, y = data(50)
    case.model.set_train_data(x, y, strict=False)
    mll(case.model(x), y)
    assert mll.report.truncation.truncation.min_steps == 80


def test_automatic_truncation_keeps_the_variance_small() -> None:
    case = smooth_case()
    mll = roulette(case, truncation=AutomaticTruncation(), preconditioner=None)
    variances = []
    for _ in range(10):
        mll(case.model(case.x), case.y)
        variances.append(float(mll.report.truncation.relative_variance))
    assert max(variances[1:]) < 0.5
    assert mll.report.iterations < 80


def adam(case: Case, mll: gpytorch.mlls.MarginalLogLikelihood, steps: int, rate: float = 0.05) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(case.model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(0.5 * steps), int(0.75 * steps)], 0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        (-mll(case.model(case.x), case.y)).backward()
        optimizer.step()
        scheduler.step()
    return optimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
def test_training_ends_where_exact_gradients_end_and_truncated_training_does_not() -> None:
    ends = {}
    for name in ("exact", "roulette", "truncated"):
        case = smooth_case()
        if name == "exact":
            mll = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)
        elif name == "roulette":
            mll = roulette(case, truncation=ExponentialTruncation(8, 0.1), preconditioner=None, num_truncations=4)
        else:
            mll = TruncatedCG(case.likelihood, case.model, num_steps=6, preconditioner=None, generator=0)
        with gpytorch.settings.fast_computations(False, False, False):
            adam(case, mll, 40, rate=0.1)
        case.model.train()
        with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
            exact_mll = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)
            ends[name] = float(exact_mll(case.model(case.x), case.y))
    assert ends["roulette"] > ends["exact"] - 0.01
    assert ends["truncated"] < ends["exact"] - 0.05


def test_frozen_draws_make_a_smooth_function() -> None:
    case = smooth_case()
    mll = roulette(case, resample=False)
    first, second = (float(mll(case.model(case.x), case.y).detach()) for _ in range(2))
    assert first == second
    resampled = roulette(case)
    first, second = (float(resampled(case.model(case.x), case.y).detach()) for _ in range(2))
    assert first != second


def test_a_fixed_truncation_is_truncated_conjugate_gradients() -> None:
    case, options = smooth_case(), {"num_probes": 4, "generator": 0}
    baseline = TruncatedCG(case.likelihood, case.model, num_steps=6, **options)
    mll = RussianRoulette(case.likelihood, case.model, truncation=FixedTruncation(6), num_truncations=1, **options)
    with pytest.warns(gpi.errors.BiasWarning, match="6 steps"):  # the baseline does not warn
        value = mll(case.model(case.x), case.y)
    assert value == baseline(case.model(case.x), case.y)


def test_frozen_draws_of_another_truncation_are_refused() -> None:
    case, other = smooth_case(), ExponentialTruncation(20, 0.5)
    frozen = roulette(case, resample=False)
    frozen(case.model(case.x), case.y)
    roulette(case, resample=False).load_training_state(frozen.training_state())
    for resample in (False, True):
        state = roulette(case, resample=resample).training_state()
        with pytest.raises(ValueError, match=r"min_steps=6.*min_steps=20"):
            roulette(case, resample=resample, truncation=other).load_training_state(state)


@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
def test_a_failed_step_leaves_no_trace() -> None:
    for resample in (True, False):
        case = smooth_case()
        mll = roulette(case, resample=resample)
        before = mll.training_state()
        with pytest.raises(gpi.errors.NonFiniteError, match=r"Column|column"):
            mll(case.model(case.x), 1e300 * case.y)  # finite, and its norm is not
        after = mll.training_state()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert torch.isfinite(mll(case.model(case.x), case.y))


def test_predictions_are_solved_to_tolerance() -> None:
    case = smooth_case()
    x = case.x[::3] + 0.05
    mll = roulette(case)
    mll(case.model(case.x), case.y)
    prediction = mll.posterior()(x)
    case.model.eval()
    case.model.prediction_strategy = None
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        expected = case.model(x)
    torch.testing.assert_close(prediction.mean, expected.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(prediction.variance, expected.variance, rtol=1e-5, atol=1e-7)


def test_sum_of_likelihoods_deepcopy_and_dtype_change() -> None:
    x, y = data(30)
    models = []
    for target in (y, y.flip(0)):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        models.append(Regression(x, target, likelihood, kernels.ScaleKernel(kernels.RBFKernel())).double())
    model = gpytorch.models.IndependentModelList(*models)
    likelihood = gpytorch.likelihoods.LikelihoodList(*(m.likelihood for m in models))
    mll = gpytorch.mlls.SumMarginalLogLikelihood(
        likelihood, model, mll_cls=functools.partial(RussianRoulette, generator=3)
    )
    mll(model(*model.train_inputs), model.train_targets).backward()
    assert all(p.grad is not None for p in model.parameters())

    case = smooth_case()
    mll = roulette(case, truncation=AutomaticTruncation())
    adam(case, mll, 2)
    assert copy.deepcopy(mll).training_state().keys() == mll.training_state().keys()
    mll.float()
    single = dataclasses.replace(case, x=case.x.float(), y=case.y.float())
    case.model.set_train_data(single.x, single.y, strict=False)
    adam(single, mll, 2)
    assert mll.report.value.dtype == torch.float32


def test_global_generator_is_never_touched() -> None:
    before = torch.random.get_rng_state()
    case = smooth_case()
    adam(case, RussianRoulette(case.likelihood, case.model), 2)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("mll_class", [RussianRoulette, TruncatedCG])
@pytest.mark.parametrize("num_probes", [1, 3])
def test_one_datum(mll_class: type, num_probes: int) -> None:
    x, y = torch.tensor([[0.3]]).double(), torch.tensor([1.2]).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5))).double()
    mll = mll_class(likelihood, model, num_probes=num_probes, generator=0)
    value = mll(model(x), y)
    variance = (model.covar_module.outputscale + likelihood.noise).item()
    expected = -0.5 * (1.44 / variance + math.log(2 * math.pi * variance))
    assert float(value.detach()) == pytest.approx(expected, abs=1e-6)
    value.backward()
    # No residual at all: the log-determinant alone.
    model.mean_module.constant.data.fill_(1.2)
    assert float(mll(model(x), y).detach()) == pytest.approx(-0.5 * math.log(2 * math.pi * variance), abs=1e-6)


def test_masked_targets_are_dropped() -> None:
    case = smooth_case()
    y = case.y.clone()
    y[[3, 17]] = torch.nan
    mll = roulette(case, truncation=ExponentialTruncation(200, 0.05), num_probes=200)
    with gpytorch.settings.observation_nan_policy("mask"):
        masked, expected = dataclasses.replace(case, y=y), None
        value = mll(case.model(case.x), masked.y).detach()
        with gpytorch.settings.fast_computations(False, False, False), torch.no_grad():
            expected = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)(case.model(case.x), y)
    assert_within(value, expected, mll.report.value_sem, max_sem=0.1, floor=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"num_truncations": 1}, ValueError, r"num_truncations.*1.*TruncatedCG"),
        ({"num_probes": 0}, ValueError, r"num_probes.*0"),
        ({"probe_truncation": "none"}, ValueError, "none"),
        ({"truncation": 80}, TypeError, r"int.*ExponentialTruncation"),
        ({"truncation": ExponentialTruncation}, TypeError, "an object.*class.*ExponentialTruncation"),
        ({"truncation": AutomaticTruncation}, TypeError, "AutomaticTruncation"),
        ({"truncation": AutomaticTruncation(), "resample": False}, ValueError, "resample=False"),
    ],
)
def test_options_outside_their_range(options: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        roulette(smooth_case(), **options)


def test_refusals_of_data_and_models() -> None:
    case = smooth_case()
    with pytest.raises(gpi.errors.UnsupportedLikelihoodError, match="BernoulliLikelihood"):
        RussianRoulette(gpytorch.likelihoods.BernoulliLikelihood(), case.model)
    with pytest.raises(ValueError, match=r"num_steps.*0"):
        TruncatedCG(case.likelihood, case.model, num_steps=0)
    mll = roulette(case)
    with pytest.raises(ValueError, match=r"\(60,\).*\(59,\)"):
        mll(case.model(case.x), case.y[:-1])
    y = case.y.clone()
    y[7] = torch.nan
    with pytest.raises(ValueError, match=r"target\[7\] is nan"):
        mll(case.model(case.x), y)
    case.likelihood.noise_covar.raw_noise_constraint.lower_bound.fill_(-1.0)
    case.likelihood.noise_covar.raw_noise.data.fill_(-30.0)
    with pytest.raises(ValueError, match=r"noise\[0\].*GreaterThan"):
        mll(case.model(case.x), case.y)


def test_truncated_baseline_equals_its_formula() -> None:
    """The gradient of truncated iterates: 1/2 x^T dH x less the trace term, from a dense twin."""
    case = smooth_case()
    n = len(case.y)
    mll = TruncatedCG(
        case.likelihood, case.model, num_steps=5, num_probes=n, preconditioner=None, resample=False, generator=0
    )
    mll(case.model(case.x), case.y)
    state = mll.training_state()
    probes = n**0.5 * torch.eye(n, dtype=torch.float64)
    mll.load_training_state({**state, "series.probes.base": probes})
    _, gradients = value_and_gradients(mll, case)
    dense = full_matrix(case)
    residual = (case.y - case.model.mean_module(case.x)).detach()
    columns = torch.cat([residual.unsqueeze(-1), probes], dim=-1)
    series = gpi.solvers.conjugate_gradient_series(
        gpi.linear_operators.NoisyLinearOperator(to_linear_operator(dense), torch.zeros(n, dtype=torch.float64)),
        columns,
        torch.arange(n + 1),
        torch.full((n + 1,), 5),
        torch.zeros(5),
        preconditioner=None,
    )
    x, solved = series.sums[:, 0], series.sums[:, 1:]
    # For the noise dH is the identity.
    by_noise = (0.5 * x @ x - 0.5 / n * (solved * probes).sum()) / n
    raw = case.likelihood.noise_covar.raw_noise
    slope = torch.autograd.functional.jacobian(case.likelihood.noise_covar.raw_noise_constraint.transform, raw.detach())
    found = gradients["likelihood.noise_covar.raw_noise"]
    torch.testing.assert_close(found, (by_noise * slope).reshape(found.shape), rtol=1e-6, atol=1e-9)
    assert mll.report.truncation.truncation == FixedTruncation(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evaluation_without_autograd(dtype: torch.dtype) -> None:
    case = smooth_case(dtype)
    mll = roulette(case, resample=False, truncation=ExponentialTruncation(30, 0.05))
    value = mll(case.model(case.x), case.y)
    with torch.no_grad():
        assert torch.equal(mll(case.model(case.x), case.y), value.detach())
    with torch.inference_mode():
        torch.testing.assert_close(mll(case.model(case.x), case.y), value.detach())

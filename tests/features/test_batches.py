"""What a mini-batch step promises: unbiased estimates, a bound, a tracker that is a natural gradient step, resume."""

import copy
import io
import pickle

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.features.weight_space import problem as problem_module
from gpy_iterative.features.weight_space.problem import WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import (
    WeightDistribution,
    exact_statistics,
    log_marginal_likelihood_gap,
    surrogate,
)
from gpy_iterative.training.run import NO_ROWS, Run, next_rows
from tests.exact.gaussian_models import Case, data
from tests.features.feature_models import KERNELS, Counting, feature_case, fixed_noise_case, network
from tests.features.test_exact import METHODS
from tests.monte_carlo import assert_mean_within

VariationalFeature = gpi.mlls.VariationalFeatureMarginalLogLikelihood
WITH_WEIGHTS = [name for name in METHODS if name != "minibatch"]
UNBIASED = ["natural-unbiased", "gradient", "minimax", "compositional"]


def spoiled(method: str, case: Case, **options) -> gpytorch.mlls.MarginalLogLikelihood:
    """A mll whose weights are off: started at other hyperparameters."""
    mll = METHODS[method](case.likelihood, case.model, **options)
    before = [p.detach().clone() for p in case.model.parameters()]
    generator = torch.Generator().manual_seed(5)
    for p in case.model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    mll.refresh()
    for p, value in zip(case.model.parameters(), before, strict=True):
        p.data = value
    return mll


def kept(mll: gpytorch.mlls.MarginalLogLikelihood, name: str) -> Tensor:
    """What the run has of the weights."""
    return mll.training_state()[f"weights.{name}"]


def step(mll: gpytorch.mlls.MarginalLogLikelihood, case: Case, indices: Tensor | None = None) -> Tensor:
    """Value and all gradients of one training step, flat."""
    mll.train()
    mll.zero_grad()
    value = mll(case.model(case.x), case.y, indices=indices)
    value.backward()
    return torch.cat([value.detach().reshape(1), *(p.grad.reshape(-1) for p in mll.parameters() if p.grad is not None)])


@pytest.mark.slow
@pytest.mark.parametrize("method", UNBIASED)
@pytest.mark.parametrize("make", [fixed_noise_case, lambda: feature_case(KERNELS["deep"]())])
def test_mean_over_all_single_rows_is_the_full_batch(method: str, make) -> None:
    case = make()
    mll = spoiled(method, case, batch_size=1)
    state = mll.training_state()
    everything = step(mll, case, torch.arange(len(case.y)))
    singles = []
    for i in range(len(case.y)):
        mll.load_training_state(state)
        singles.append(step(mll, case, torch.tensor([i])))
    torch.testing.assert_close(torch.stack(singles).mean(0), everything, rtol=1e-10, atol=1e-10)
    assert torch.stack(singles).std(0).max() > 1e-3


def test_random_batches_within_standard_errors() -> None:
    case = feature_case(KERNELS["fourier"](), n=60)
    mll = spoiled("natural-unbiased", case, batch_size=8, generator=0)
    state = mll.training_state()
    everything = step(mll, case, torch.arange(60))
    mll.load_training_state(state)
    mll._rate = lambda *args: 0.0  # keeps the weights; rows go on
    draws = torch.stack([step(mll, case) for _ in range(100)])
    assert_mean_within(draws, everything, max_sem=0.3)


def test_minibatch_baseline_is_the_exact_likelihood_of_its_rows() -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    rows = torch.tensor([3, 11, 4, 28, 19])
    mll = gpi.mlls.MinibatchMarginalLogLikelihood(case.likelihood, case.model, batch_size=5)
    found = step(mll, case, rows)
    covariance = case.model.covar_module(case.x[rows]).to_dense() + case.likelihood.noise * torch.eye(5)
    mean = case.model.mean_module(case.x[rows])
    expected = torch.distributions.MultivariateNormal(mean, covariance).log_prob(case.y[rows]) / 5
    case.model.zero_grad()
    expected.backward()
    gradients = [p.grad.reshape(-1) for p in mll.parameters()]
    torch.testing.assert_close(found, torch.cat([expected.detach().reshape(1), *gradients]), rtol=1e-9, atol=1e-9)


def test_minibatch_baseline_takes_any_kernel() -> None:
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)) + kernels.PeriodicKernel()
    case = feature_case(kernel, n=30)
    prior = case.model.forward
    case.model.forward = lambda x: gpytorch.distributions.MultivariateNormal(
        prior(x).loc, 1.7 * prior(x).lazy_covariance_matrix
    )
    with gpytorch.settings.fast_computations(False, False, False):
        exact = step(gpytorch_exact(case), case)
    mll = gpi.mlls.MinibatchMarginalLogLikelihood(case.likelihood, case.model)
    torch.testing.assert_close(step(mll, case), exact, rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match=r"MaternKernel has no finite feature map.*LinearKernel"):
        mll.exact_value()


def gpytorch_exact(case: Case) -> gpytorch.mlls.MarginalLogLikelihood:
    class Exact(gpytorch.mlls.ExactMarginalLogLikelihood):
        def forward(self, function_dist, target, indices=None):
            return super().forward(function_dist, target)

    return Exact(case.likelihood, case.model)


def test_bound_and_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_module, "CHUNK_SIZE", 13)
    case = feature_case(KERNELS["fourier"](), n=60)
    problem = WeightSpaceProblem(case.likelihood, case.model(case.x), case.y)
    precision, moment = exact_statistics(problem)
    posterior = WeightDistribution.from_precision(precision, moment)
    batch = problem.batch(torch.arange(60))
    m, generator = len(moment), torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    objective = lambda w: (surrogate(batch, w.mean, w.root, w.root) - w.log_determinant - m).detach()
    exact = objective(posterior)
    for _ in range(20):
        root = (torch.eye(m) + 0.2 * normal(m, m)).double() @ posterior.root
        weights = WeightDistribution(posterior.mean + 0.1 * normal(m), root, 2 * torch.linalg.slogdet(root)[1])
        gap = log_marginal_likelihood_gap(weights, precision, moment)
        assert gap > 0
        torch.testing.assert_close(objective(weights) - exact, gap, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("method", WITH_WEIGHTS)
def test_gap_of_a_spoiled_state_and_after_a_refresh(method: str) -> None:
    case = feature_case(KERNELS["fourier"](), n=60)
    mll = spoiled(method, case, batch_size=60)
    gap = mll.gap()
    assert gap > 1e-3
    if method not in ("compositional", "minimax"):
        with torch.no_grad():
            torch.testing.assert_close(mll.exact_value() - mll(case.model(case.x), case.y), gap, rtol=1e-8, atol=1e-10)
    mll.refresh()
    assert mll.gap() < 1e-10


def test_the_tracker_is_a_natural_gradient_step() -> None:
    """Sigma^-1 + rho dJ/dSigma, by finite differences in Sigma, and the same for the mean's natural parameter."""
    case = feature_case(KERNELS["linear"](), n=20)
    mll = spoiled("natural", case, batch_size=20, tracker_rate=0.3)
    precision = kept(mll, "precision")
    covariance = torch.linalg.inv(precision)
    mean = covariance @ kept(mll, "moment")
    batch = WeightSpaceProblem(case.likelihood, case.model(case.x), case.y).batch(torch.arange(20))

    def objective(sigma: Tensor) -> Tensor:
        return surrogate(batch, mean, sigma, torch.eye(3).double()) - torch.linalg.slogdet(sigma)[1]

    derivative = torch.autograd.functional.jacobian(objective, covariance)
    step(mll, case)
    torch.testing.assert_close(kept(mll, "precision"), precision + 0.3 * derivative, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["natural", "compositional"])
def test_a_batch_of_all_data_leaves_nothing_to_average(method: str) -> None:
    """A slow average of exact sums would lag behind the hyperparameters for hundreds of steps."""
    case = feature_case(KERNELS["fourier"](), n=30)
    mll = spoiled(method, case)
    exact, _ = exact_statistics(
        WeightSpaceProblem(case.likelihood, case.model(case.x), case.y), centred=method == "natural"
    )
    all_and_more = torch.cat([torch.arange(30), torch.zeros(60, dtype=torch.int64)])
    assert mll._rate(0, all_and_more, 30) < 1
    step(mll, case, torch.zeros(30, dtype=torch.int64))  # as many rows, but not all
    assert (kept(mll, "precision") - exact).abs().max() > 0.1 * exact.abs().max()
    step(mll, case)
    torch.testing.assert_close(kept(mll, "precision"), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["natural", "compositional"])
def test_a_batch_of_fewer_rows_moves_the_average_less(method: str) -> None:
    """As the last one of a pass."""
    moved = []
    for rows in (1, 5):
        case = feature_case(KERNELS["fourier"](), n=30)
        mll = spoiled(method, case, batch_size=5)
        before = kept(mll, "precision").clone()
        step(mll, case, torch.full((rows,), 7))
        moved.append(kept(mll, "precision") - before)
    torch.testing.assert_close(5 * moved[0], moved[1], rtol=1e-9, atol=1e-9)


def test_tracker_inflation_is_that_of_the_effective_sample_size() -> None:
    """E tr(P_t^-1 P) / m = 1 / (1 - m / N), N = b (2 - rate) / rate, for features like Gaussian ones."""
    m, b, rate, n = 8, 8, 0.2, 4000
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, m, generator=generator, dtype=torch.float64)
    case = feature_case(kernels.LinearKernel(), n=40)
    case.model.set_train_data(x, x[:, 0], strict=False)
    mll = gpi.mlls.CompositionalMarginalLogLikelihood(
        case.likelihood, case.model, batch_size=b, tracker_rate=rate, generator=0
    )
    ratios = []
    with gpytorch.settings.debug(False):
        prior = case.model(x)
        mll.refresh()
        exact = kept(mll, "precision")
        for t in range(600):
            mll(prior, x[:, 0])
            if t > 50:
                ratios.append(torch.linalg.solve(kept(mll, "precision"), exact).trace() / m)
    effective = b * (2 - rate) / rate
    assert abs(torch.stack(ratios).mean() * (1 - m / effective) - 1) < 0.03


def test_the_network_sees_the_batch_alone() -> None:
    spy = Counting(network())
    case = feature_case(gpi.kernels.DeepFeatureKernel(spy, kernels.LinearKernel()), n=50)
    mll = VariationalFeature(case.likelihood, case.model, batch_size=7, generator=0)
    step(mll, case)  # the first call makes its pass
    spy.rows.clear()
    for _ in range(8):
        step(mll, case)
    step(mll, case, torch.tensor([1, 2, 3]))
    assert spy.rows == [7] * 8 + [3]
    assert mll.report.batch_size == 3
    assert mll.report.steps == 10


def test_rows_are_an_epoch() -> None:
    run = Run.begin(0).having(rows=NO_ROWS)
    for _ in range(3):
        epoch = []
        for _ in range(4):
            rows, run = next_rows(run, "rows", 23, 5)
            epoch.append(rows)
        assert len(torch.cat(epoch).unique()) == 20
    counts = torch.zeros(6)
    for _ in range(3000):
        rows, run = next_rows(run, "rows", 6, 4)
        counts[rows] += 1
    assert (counts / 3000 - 4 / 6).abs().max() < 4 * (4 / 6 * 2 / 6 / 3000) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("through_file", [False, True])
def test_resume_is_bit_for_bit(method: str, through_file: bool) -> None:
    case = feature_case(KERNELS["deep-fourier"](), n=40)
    mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=3)
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.02)

    def train(mll, optimizer, model, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = -mll(model(case.x), case.y)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values

    train(mll, optimizer, case.model, 7)
    saved = mll.training_state(), mll.state_dict(), optimizer.state_dict()
    if through_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    else:
        saved = copy.deepcopy(saved)
    expected = train(mll, optimizer, case.model, 9)

    other = feature_case(KERNELS["deep-fourier"](), n=40)
    again = METHODS[method](other.likelihood, other.model, batch_size=8, generator=99)
    restarted = torch.optim.Adam(again.parameters(), lr=0.5)
    again.load_state_dict(saved[1])
    again.load_training_state(saved[0])
    restarted.load_state_dict(saved[2])
    assert train(again, restarted, other.model, 9) == expected


@pytest.mark.parametrize("method", METHODS)
def test_copies_go_their_own_way(method: str) -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=3)
    step(mll, case)
    twins = [copy.deepcopy(mll), pickle.loads(pickle.dumps(mll))]
    expected = [step(mll, case) for _ in range(5)]
    for twin in twins:
        its = Case(twin.model, twin.likelihood, case.x, case.y)
        for values in expected:
            torch.testing.assert_close(step(twin, its), values, rtol=0, atol=0)


@pytest.mark.parametrize("change", ["refresh", "optimiser"])
@pytest.mark.parametrize("method", WITH_WEIGHTS)
def test_a_change_of_the_weights_before_the_backward_pass_leaves_the_gradient(method: str, change: str) -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    mll = spoiled(method, case, batch_size=8, generator=3)
    twin = copy.deepcopy(mll)
    expected = step(twin, Case(twin.model, twin.likelihood, case.x, case.y))
    value = mll(case.model(case.x), case.y)
    if change == "refresh":
        mll.refresh()
    else:  # as an optimiser does
        with torch.no_grad():
            for weights in mll.parameters(recurse=False):
                weights.add_(1.0)
    value.backward()
    gradients = [p.grad.reshape(-1) for p in mll.parameters() if p.grad is not None]
    torch.testing.assert_close(torch.cat([value.detach().reshape(1), *gradients]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_looking_moves_nothing(method: str) -> None:
    case = feature_case(KERNELS["fourier"](), n=30)
    mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=3)
    step(mll, case)
    before = mll.training_state()
    with torch.no_grad():
        first = mll(case.model(case.x), case.y)
        assert torch.equal(first, mll(case.model(case.x), case.y))
    with torch.inference_mode():
        assert torch.equal(first, mll(case.model(case.x), case.y))
    mll.posterior()(case.x[:3])
    mll.exact_value()
    after = mll.training_state()
    assert all(torch.equal(before[key], after[key]) for key in before)
    if method not in ("natural", "natural-uncentred"):  # whose training steps use the batch before they estimate
        assert torch.equal(step(mll, case)[0], first)


@pytest.mark.parametrize("method", METHODS)
def test_state_stays_double_and_out_of_the_state_dict(method: str) -> None:
    x, _ = data(30)
    case = feature_case(KERNELS["fourier"](), n=30, dtype=torch.float32)
    mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=3)
    value = mll(case.model(case.x), case.y)
    assert value.dtype == torch.float32
    value.backward()
    state = mll.training_state()
    mll.double().float()
    assert all(torch.equal(tensor, state[name]) for name, tensor in mll.training_state().items())
    stock = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)
    assert mll.state_dict().keys() == stock.state_dict().keys()
    mll.load_state_dict(stock.state_dict())
    mll.double()
    case.model.set_train_data(x, case.y.double(), strict=False)
    assert mll(case.model(x), case.y.double()).dtype == torch.float64


def test_float32_is_as_good_as_its_data() -> None:
    """Small noise and many rows: the sums are in float64."""
    values = []
    for dtype in (torch.float64, torch.float32):
        case = feature_case(KERNELS["fourier"](), n=3000, dtype=dtype)
        case.likelihood.noise = 1e-3
        mll = VariationalFeature(case.likelihood, case.model, batch_size=3000)
        values.append(step(mll, case).double())
    torch.testing.assert_close(values[1], values[0], rtol=1e-3, atol=1e-3)


def test_priors_and_sums_of_likelihoods() -> None:
    cases = [feature_case(KERNELS[name]()) for name in ("fourier", "polynomial")]
    prior = gpytorch.priors.GammaPrior(2.0, 0.5)
    cases[0].model.covar_module.register_prior("outputscale_prior", prior, "outputscale")
    models = gpytorch.models.IndependentModelList(*(case.model for case in cases))
    likelihoods = gpytorch.likelihoods.LikelihoodList(*(case.likelihood for case in cases))
    expected, found = (
        gpytorch.mlls.SumMarginalLogLikelihood(likelihoods, models, mll_cls=kind)
        for kind in (gpytorch.mlls.ExactMarginalLogLikelihood, VariationalFeature)
    )
    models.train()
    with gpytorch.settings.fast_computations(False, False, False):
        outputs = models(*models.train_inputs)
        torch.testing.assert_close(
            found(outputs, models.train_targets), expected(outputs, models.train_targets), rtol=1e-8, atol=1e-8
        )


def test_minimax_projects_its_matrix_and_ascends_within_its_ball() -> None:
    case = feature_case(KERNELS["fourier"](), n=40)
    mll = gpi.mlls.MinimaxMarginalLogLikelihood(case.likelihood, case.model, batch_size=40, generator=0)
    mll.refresh()
    precision, dual, scale = mll.auxiliary.detach().clone(), kept(mll, "dual"), kept(mll, "scale")
    drawn = torch.randn(12, 12, generator=torch.Generator().manual_seed(1)).double()
    lengths = []
    for size in (0.02, 1.0, 1.0, 1.0):
        mll(case.model(case.x), case.y)
        mll.auxiliary.data += size * (drawn + drawn.mT)  # an optimiser's step
        values, vectors = torch.linalg.eigh(mll.auxiliary.detach() * scale)
        matrix = vectors @ torch.diag(values.clamp(min=1)) @ vectors.mT / scale
        dual = dual + 0.5 * (matrix - precision) / matrix.norm()
        lengths.append(float(dual.norm()))
        dual = dual / dual.norm().clamp(min=1)
        torch.testing.assert_close(kept(mll, "dual"), dual)
        torch.testing.assert_close(mll.auxiliary.detach(), matrix)
    assert values.min() < 0
    assert min(lengths) < 0.9
    assert max(lengths) > 1.1


@pytest.mark.parametrize(("factor", "is_minimum"), [(0.9, False), (1.1, True)])
def test_minimax_is_exact_from_its_threshold_on(factor: float, is_minimum: bool) -> None:
    """Of log|A| + mu |A - P| / |A|, A = P is a local minimum just when mu >= |P| |P^-1|."""
    case = feature_case(KERNELS["linear"](), n=40)
    mll = gpi.mlls.MinimaxMarginalLogLikelihood(case.likelihood, case.model)
    mll.refresh()
    precision = (mll.auxiliary * kept(mll, "scale")).detach()
    inverse = torch.linalg.inv(precision)
    torch.testing.assert_close(kept(mll, "strength"), 1.2 * precision.norm() * inverse.norm())
    mu = factor * precision.norm() * inverse.norm()
    penalised = lambda a: torch.logdet(a) + mu * (a - precision).norm() / a.norm()
    moved = precision - 1e-5 * torch.linalg.eigvalsh(precision).min() * inverse / inverse.norm()
    assert bool(penalised(moved) > penalised(precision)) == is_minimum


@pytest.mark.parametrize("include_batch", [False, True])
def test_an_estimate_knows_half_of_its_batch_or_nothing(include_batch: bool) -> None:
    case = feature_case(KERNELS["fourier"](), n=40)
    mll = VariationalFeature(
        case.likelihood, case.model, batch_size=8, tracker_rate=0.3, include_batch=include_batch, generator=0
    )
    mll.refresh()
    rows = torch.tensor([1, 5, 8, 13, 21])
    batch = WeightSpaceProblem(case.likelihood, case.model(case.x), case.y).batch(rows)
    basis, noise = batch.basis, batch.noise
    estimate = torch.diag(1 / batch.variances) + 8 * basis.mT @ torch.diag(1 / noise) @ basis
    target = 8 * basis.mT @ (batch.residual / noise)
    share = 0.15 if include_batch else 0.0
    precision = (1 - share) * kept(mll, "precision") + share * estimate
    covariance = torch.linalg.inv(precision)
    mean = covariance @ ((1 - share) * kept(mll, "moment") + share * target)
    after = 0.7 * kept(mll, "precision") + 0.3 * estimate
    found = step(mll, case, rows)[0]
    data_terms = ((batch.residual - basis @ mean).square() + (basis @ covariance * basis).sum(-1)) / noise + noise.log()
    prior_terms = (mean.square() + covariance.diagonal()) / batch.variances + batch.variances.log()
    objective = 8 * data_terms.sum() + prior_terms.sum() + torch.logdet(precision) - len(mean)
    expected = -(objective + 40 * torch.log(torch.tensor(2 * torch.pi))) / 80
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kept(mll, "precision"), after.detach(), rtol=1e-10, atol=1e-10)

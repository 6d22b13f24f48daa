"""Training loops as users write them: Adam, L-BFGS, several outputs, checkpoints, warm starts."""

import copy
import dataclasses
import functools
import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import ConvergenceWarning, VarianceWarning
from gpy_iterative.linear_operators import NoisyLinearOperator
from gpy_iterative.linear_solvers.columns import LinearSystem
from gpy_iterative.linear_solvers.solution import Solution
from tests.exact.gaussian_models import Case, Regression, data, regression

ITERATIVE = gpi.solvers.AlternatingProjections(tolerance=1e-2, block_size=32)


def matern_case(n: int = 150) -> Case:
    return regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=3)), n=n)


def exact_value(case: Case) -> float:
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)
    case.model.train()
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        return mll(case.model(case.x), case.y).item()


def adam(case: Case, mll: gpytorch.mlls.MarginalLogLikelihood, steps: int, optimizer=None) -> list[float]:
    """The ordinary loop; returns the epochs of every step."""
    optimizer = optimizer or torch.optim.Adam(case.model.parameters(), lr=0.1)
    epochs = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(case.model(case.x), case.y)
        loss.backward()
        optimizer.step()
        report = getattr(mll, "report", None)
        epochs.append(report.epochs if report else 0.0)
    return epochs


@pytest.mark.slow
@pytest.mark.parametrize(
    "mll_class", [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood]
)
def test_adam_ends_where_exact_gradients_end(mll_class: type) -> None:
    reference, case = matern_case(), matern_case()
    with gpytorch.settings.fast_computations(False, False, False):
        adam(reference, gpytorch.mlls.ExactMarginalLogLikelihood(reference.likelihood, reference.model), 30)
    adam(case, mll_class(case.likelihood, case.model, solver=ITERATIVE, generator=0), 30)
    assert abs(exact_value(case) - exact_value(reference)) * len(case.y) < 2


@pytest.mark.slow
def test_warm_start_halves_the_epochs_of_pathwise_training() -> None:
    epochs = {}
    solver = dataclasses.replace(
        ITERATIVE, fallback=None
    )  # with its fallback, the solver needs few epochs cold as well
    for warm_start in (False, "previous", "extrapolated"):
        case = matern_case()
        mll = gpi.mlls.PathwiseMarginalLogLikelihood(
            case.likelihood, case.model, num_probes=16, solver=solver, warm_start=warm_start, generator=0
        )
        epochs[warm_start] = sum(adam(case, mll, 30))
    assert epochs["previous"] < 0.5 * epochs[False]
    assert epochs["extrapolated"] < epochs["previous"]


@pytest.mark.slow
def test_lbfgs_with_frozen_probes_reaches_the_exact_optimum() -> None:
    reference, case = matern_case(150), matern_case(150)

    def minimise(case: Case, mll: gpytorch.mlls.MarginalLogLikelihood) -> float:
        optimizer = torch.optim.LBFGS(case.model.parameters(), max_iter=40, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = -mll(case.model(case.x), case.y)
            loss.backward()
            return loss

        optimizer.step(closure)
        return exact_value(case) * len(case.y)

    with gpytorch.settings.fast_computations(False, False, False):
        best = minimise(reference, gpytorch.mlls.ExactMarginalLogLikelihood(reference.likelihood, reference.model))
    solver = gpi.solvers.ConjugateGradients(tolerance=1e-6)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, num_probes=64, solver=solver, warm_start="previous", generator=0
    )
    with pytest.warns(VarianceWarning, match="line search"):
        reached = minimise(case, mll)
    assert reached > best - 3


@pytest.mark.parametrize(("max_epochs", "products"), [(1, 2), (3, 3), (1000, None), (math.inf, None)])
def test_the_value_keeps_to_the_solvers_budget(max_epochs: float, products: int | None) -> None:
    case = matern_case()
    solver = dataclasses.replace(ITERATIVE, max_epochs=max_epochs)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=solver, generator=0)
    case.likelihood.noise = 1e-3
    mll.logdet_probes = dataclasses.replace(mll.logdet_probes, recipe=gpi.preconditioners.PivotedCholesky(rank=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mll(case.model(case.x), case.y)
    taken = mll.training_state()["quadrature.values"].shape[-1]
    assert taken == products if products else taken > 3


def test_a_warm_step_begins_with_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guess' residual and the quadrature's first product read the tiles together."""
    case = matern_case()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=ITERATIVE, generator=0)
    widths, matmul = [], NoisyLinearOperator._matmul

    def counting(operator: NoisyLinearOperator, rhs: Tensor) -> Tensor:
        widths.append(rhs.shape[-1])
        return matmul(operator, rhs)

    cold = mll(case.model(case.x), case.y)
    monkeypatch.setattr(NoisyLinearOperator, "_matmul", counting)
    warm = mll(case.model(case.x), case.y)
    assert mll.report.epochs == 0  # nothing has moved
    assert widths[0] == 1 + 16 + 4
    assert set(widths[1:]) == {4}
    assert abs(warm.item() - cold.item()) < mll.report.value_sem.item()  # the same probes


def test_a_foreign_training_state_is_refused() -> None:
    case = matern_case(20)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    with pytest.raises(ValueError, match="no training state"):
        mll.load_training_state({"weights": torch.ones(2)})


@pytest.mark.parametrize("other", ["probes", "class", "generator"])
def test_a_training_state_that_does_not_fit_is_refused_and_changes_nothing(other: str) -> None:
    case = matern_case(20)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=ITERATIVE, generator=0)
    mll_class = gpi.mlls.PathwiseMarginalLogLikelihood if other == "class" else gpi.mlls.HutchinsonMarginalLogLikelihood
    foreign = mll_class(case.likelihood, case.model, num_probes=5, solver=ITERATIVE, generator=1)
    for each in (mll, foreign):
        each(case.model(case.x), case.y)
    before, state = mll.training_state(), foreign.training_state()
    if other == "generator":
        state = before | {"generator": torch.zeros(3)}
    with pytest.raises(ValueError, match="training state"):
        mll.load_training_state(state)
    after = mll.training_state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "mll_class", [gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("resumed", [False, True])
def test_draws_stay_frozen_in_every_dtype(mll_class: type, dtype: torch.dtype, resumed: bool) -> None:
    # Features are drawn in float64 whatever the data's dtype: that is no reason to draw them anew.
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)), n=30, dtype=dtype)
    mll = mll_class(case.likelihood, case.model, solver=ITERATIVE, generator=0)
    mll(case.model(case.x), case.y)
    before = mll.training_state()
    if resumed:
        mll = mll_class(case.likelihood, case.model, solver=ITERATIVE, generator=1)
        mll.load_training_state(before)
    mll(case.model(case.x), case.y)
    after = mll.training_state()
    for key in before:
        if not key.startswith(("description", "warm_start", "quadrature")):  # these follow the solves
            assert torch.equal(before[key], after[key]), key


def test_state_dict_stays_that_of_the_stock_mll() -> None:
    case = matern_case(30)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=ITERATIVE, generator=0)
    adam(case, mll, 2)
    stock = gpytorch.mlls.ExactMarginalLogLikelihood(case.likelihood, case.model)
    assert mll.state_dict().keys() == stock.state_dict().keys()
    mll.load_state_dict(stock.state_dict())


def test_sum_of_marginal_log_likelihoods() -> None:
    x, y = data(60)
    models = []
    for target in (y, y.flip(0)):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        models.append(Regression(x, target, likelihood, kernels.ScaleKernel(kernels.RBFKernel())).double())
    model = gpytorch.models.IndependentModelList(*models)
    likelihood = gpytorch.likelihoods.LikelihoodList(*(m.likelihood for m in models))
    ours = gpytorch.mlls.SumMarginalLogLikelihood(
        likelihood, model, mll_cls=functools.partial(gpi.mlls.HutchinsonMarginalLogLikelihood, generator=3)
    )
    stock = gpytorch.mlls.SumMarginalLogLikelihood(likelihood, model)
    with gpytorch.settings.fast_computations(False, False, False):
        expected = stock(model(*model.train_inputs), model.train_targets)
    value = ours(model(*model.train_inputs), model.train_targets)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    value.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_global_generator_is_never_touched() -> None:
    case = matern_case(40)
    before = torch.random.get_rng_state()
    for mll_class in (gpi.mlls.HutchinsonMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood):
        adam(case, mll_class(case.likelihood, case.model, num_probes=4, solver=ITERATIVE), 2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_equal_generators_give_equal_runs() -> None:
    ends = []
    for _ in range(2):
        case = matern_case(40)
        adam(
            case,
            gpi.mlls.PathwiseMarginalLogLikelihood(
                case.likelihood, case.model, num_probes=4, solver=ITERATIVE, generator=5
            ),
            3,
        )
        ends.append(torch.cat([p.detach().reshape(-1) for p in case.model.parameters()]))
    assert torch.equal(*ends)


def test_deepcopy_and_dtype_change_in_the_middle_of_training() -> None:
    case = matern_case(40)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, num_probes=4, solver=ITERATIVE, generator=0
    )
    adam(case, mll, 3)
    clone = copy.deepcopy(mll)
    assert clone.training_state().keys() == mll.training_state().keys()
    mll.float()
    single = Case(case.model, case.likelihood, case.x.float(), case.y.float())
    case.model.set_train_data(single.x, single.y, strict=False)
    adam(single, mll, 2)
    assert mll.report.value.dtype == torch.float32


def test_other_data_between_steps_redraws_the_probes() -> None:
    case = matern_case(40)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, num_probes=4, solver=ITERATIVE, generator=0
    )
    adam(case, mll, 2)
    x, y = data(55)
    case.model.set_train_data(x, y, strict=False)
    adam(Case(case.model, case.likelihood, x, y), mll, 2)
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED


class _Dense(gpi.solvers.Solver):
    """A user's own solver, with no options of its own."""

    def _solve_columns(self, system: LinearSystem) -> Solution:
        return gpi.solvers.Cholesky()._solve_columns(system)


def test_a_solver_of_the_users_own() -> None:
    case = regression(kernels.RBFKernel(), n=20)
    values = [
        gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=solver, generator=0)(
            case.model(case.x), case.y
        )
        for solver in (_Dense(), gpi.solvers.ConjugateGradients(tolerance=1e-9, probe_tolerance=1e-9))
    ]
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=1e-6)


class RoughRBF(kernels.RBFKernel):
    """With errors of 1e-5 in its entries, as float32 makes them where distances cancel, but on every processor the same."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params) -> Tensor:
        value = super().forward(x1, x2, diag=diag, **params)
        if diag:
            return value
        return value + 1e-5 * torch.sin(1e4 * (x1 @ x2.mT).square())


def smooth_case(kernel: kernels.Kernel, dtype: torch.dtype, n: int = 400) -> Case:
    x = 20 * torch.rand(n, 1, generator=torch.Generator().manual_seed(0), dtype=dtype)
    y, likelihood = torch.sin(x[:, 0]), gpytorch.likelihoods.GaussianLikelihood()
    return Case(Regression(x, y, likelihood, kernels.ScaleKernel(kernel)).to(dtype), likelihood, x, y)


@pytest.mark.slow
@pytest.mark.parametrize("probes", ["preconditioned", "rademacher"])
@pytest.mark.parametrize("solver", [gpi.solvers.ConjugateGradients(), gpi.solvers.AlternatingProjections()])
def test_smooth_data_train_at_the_defaults(probes: str, solver: gpi.solvers.Solver) -> None:
    # Of a hundred pivots thirty carry something, and from step to step others do.
    case = smooth_case(kernels.RBFKernel(), torch.float32)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, probes=probes, solver=solver, generator=0
    )
    adam(case, mll, 8)
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED


def test_pivots_that_rounding_takes_away_stay() -> None:
    case = smooth_case(RoughRBF(), torch.float64)
    base = case.model.covar_module.base_kernel
    base.lengthscale = 0.1

    def fresh(seed: int) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
        return gpi.mlls.HutchinsonMarginalLogLikelihood(
            case.likelihood, case.model, solver=gpi.solvers.ConjugateGradients(), generator=seed
        )

    mll = fresh(0)
    mll(case.model(case.x), case.y)
    pivots = mll.training_state()["probes.pivots"]
    base.lengthscale = 2.0  # a dozen pivots carry something now
    adam(case, mll, 2)
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
    with torch.no_grad():
        block = case.model(case.x).covariance_matrix[pivots][:, pivots]
    assert torch.linalg.eigvalsh(block)[0] < -1e-6
    resumed = fresh(5)
    resumed.load_training_state(mll.training_state())
    assert torch.equal(resumed.training_state()["probes.pivots"], pivots)
    assert torch.equal(resumed(case.model(case.x), case.y), mll(case.model(case.x), case.y))

"""The measured error of variances is their error."""

import pytest
import torch
from torch import Tensor

from gpy_iterative.errors import ConvergenceWarning, VarianceWarning
from gpy_iterative.exact.prediction import variance_error
from gpy_iterative.exact.prediction.joint_prior import joint_prior
from gpy_iterative.exact.prediction.projection import ExactProjection
from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.prediction import PathwisePosterior, VarianceError
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from tests.exact.gaussian_models import CASES
from tests.exact.prediction.test_posterior import dense, held_out_points


@pytest.mark.parametrize("name", ["matern-3/2", "product", "multitask", "batch", "fixed-noise"])
def test_equals_the_error_against_dense_variances(name: str) -> None:
    case, x = CASES[name](), held_out_points(9)
    posterior = PathwisePosterior(
        case.model, case.likelihood, solver=ConjugateGradients(), exact_below=0, rank=5, num_neighbours=3
    )
    _, covariance = dense(case, x)
    truth = covariance.diagonal(dim1=-2, dim2=-1)
    wanted = (posterior(x).variance.reshape(truth.shape) / truth).log().abs()
    error = posterior.variance_error(x)
    assert error.num_points == truth.numel()
    assert error.median == pytest.approx(float(wanted.median()), abs=1e-4)
    assert error.largest == pytest.approx(float(wanted.max()), abs=1e-4)
    assert error.largest > 1e-3


def test_is_measured_in_the_datas_own_precision() -> None:
    case, x = CASES["matern-3/2"](), held_out_points(20)
    case.likelihood.initialize(noise=1e-3)
    errors = [
        PathwisePosterior(
            case.model,
            case.likelihood,
            solver=ConjugateGradients(tolerance=0.9),  # of the mean, which is not asked for
            exact_below=0,
            rank=2,
            num_neighbours=1,
            products=KernelProducts(precision=chosen, tile_size=16),
        ).variance_error(x)
        for chosen in ("native", "float32")
    ]
    assert errors[0] == errors[1]
    assert errors[0].median > 0.01


def test_solves_that_miss_their_tolerance_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variance_error, "MAX_EPOCHS", 1.0)
    case = CASES["rbf"]()
    posterior = PathwisePosterior(case.model, case.likelihood, exact_below=0, solver=ConjugateGradients(), rank=5)
    with pytest.warns(
        ConvergenceWarning, match=r"^The solve of variance_error \(tolerance 0.01\) ended with status budget"
    ) as caught:
        posterior.variance_error(held_out_points(3))
    (message,) = (str(each.message) for each in caught if issubclass(each.category, ConvergenceWarning))
    assert "raise the posterior's rank" in message
    assert "max_epochs" not in message  # variance_error has no such option


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.03), (torch.float64, 1e-6)])
@pytest.mark.filterwarnings("error::gpy_iterative.errors.ConvergenceWarning")
def test_projections_that_leave_only_rounding_need_no_solve(dtype: torch.dtype, bound: float) -> None:
    """Conjugate gradients took what is left of a smooth kernel for an indefinite matrix."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(600, 2, generator=generator, dtype=torch.float64)
    case = CASES["rbf"]()
    kernel = case.model.covar_module
    kernel.base_kernel = type(kernel.base_kernel)().double()
    kernel.base_kernel.initialize(lengthscale=1.0)
    case.model.set_train_data(x.to(dtype), torch.sin(6 * x.sum(-1)).to(dtype), strict=False)
    case.model.to(dtype)
    posterior = PathwisePosterior(case.model, case.likelihood, exact_below=0, solver=ConjugateGradients())
    error = posterior.variance_error((x[:40] + 1e-3).to(dtype))
    assert error.largest < bound


@pytest.mark.filterwarnings("error::gpy_iterative.errors.ConvergenceWarning")
def test_solves_in_float32_end_where_projections_explain_nearly_all() -> None:
    """What they leave is a matrix that rounding makes singular: its solve took 1,000 products, and stagnated."""
    generator = torch.Generator().manual_seed(0)
    x, points = torch.rand(800, 2, generator=generator), torch.rand(100, 2, generator=generator)
    case = CASES["matern-3/2"]()
    kernel = case.model.covar_module
    kernel.base_kernel = type(kernel.base_kernel)(nu=1.5)
    kernel.base_kernel.initialize(lengthscale=3.0)
    kernel.initialize(outputscale=300.0)
    case.likelihood.initialize(noise=1.0)
    case.model.set_train_data(x, torch.sin(6 * x.sum(-1)), strict=False)
    case.model.float()
    posterior = PathwisePosterior(
        case.model, case.likelihood, solver=ConjugateGradients(), exact_below=0, rank=30, num_neighbours=8
    )
    variance, error = posterior(points).variance.double(), posterior.variance_error(points, num_points=100)
    case.model.double().set_train_data(x.double(), case.model.train_targets.double())
    truth = dense(case, points.double())[1].diagonal()
    assert error.median == pytest.approx(float((variance / truth).log().abs().median()), abs=0.03)


def test_exact_variances_have_none() -> None:
    case = CASES["rbf"]()
    error = PathwisePosterior(case.model, case.likelihood, solver=Cholesky()).variance_error(
        held_out_points(50), num_points=20
    )
    assert error.num_points == 20
    assert error.largest < 1e-8


def test_batches_of_points() -> None:
    case = CASES["rbf"]()
    posterior = PathwisePosterior(case.model, case.likelihood)
    assert posterior.variance_error(held_out_points(12).reshape(2, 6, 3), num_points=5).num_points == 5
    assert posterior.variance_error(held_out_points(0)) == VarianceError(0.0, 0.0, 0)
    projected = PathwisePosterior(case.model, case.likelihood, exact_below=0, solver=ConjugateGradients(), rank=5)
    assert projected.variance_error(held_out_points(0)) == VarianceError(0.0, 0.0, 0)


def test_large_errors_warn_with_the_levers() -> None:
    case = CASES["rbf"]()
    case.likelihood.initialize(noise=1e-3)
    posterior = PathwisePosterior(
        case.model, case.likelihood, exact_below=0, solver=ConjugateGradients(), rank=1, num_neighbours=1
    )
    with pytest.warns(VarianceWarning, match=r"Raise the posterior's rank \(now 1\)"):
        error = posterior.variance_error(held_out_points(20))
    assert error.median > 0.25


def far_too_few_projections(*, num_test: int) -> tuple[PathwisePosterior, Tensor, Tensor]:
    """A posterior of rank 1, points, and |log ratio| of its variances."""
    case, x = CASES["rbf"](), held_out_points(num_test)
    case.likelihood.initialize(noise=1e-3)
    posterior = PathwisePosterior(
        case.model, case.likelihood, exact_below=0, solver=ConjugateGradients(), rank=1, num_neighbours=1
    )
    covariance = posterior.solves.projection().covariance  # asks nothing of the solves
    joint = joint_prior(case.model, [x], torch.Size(), KernelProducts())
    variance = covariance(joint.test_test.to_dense(), joint.test_train).diagonal()
    return posterior, x, (variance / dense(case, x)[1].diagonal()).log().detach()


@pytest.mark.parametrize("ask", ["variance", "covariance_matrix"])
def test_first_variances_are_checked_once(ask: str) -> None:
    posterior, x, errors = far_too_few_projections(num_test=8)
    factor = f"{float(errors.median().exp()):.2f}"
    with pytest.warns(
        VarianceWarning, match=rf"by a factor of at least {factor} \(median of 8\).*gpi.solvers.Cholesky"
    ):
        getattr(posterior(x), ask)
    assert posterior(x[:3]).variance.isfinite().all()


@pytest.mark.parametrize(("epochs", "share"), [(1, 0.5), (2, 0.8), (4, 0.98)])
def test_early_ends_of_the_check_understate(epochs: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variance_error, "CHECK_EPOCHS", (epochs, epochs))
    posterior, x, errors = far_too_few_projections(num_test=8)
    joint, solves = joint_prior(posterior.model, [x], torch.Size(), KernelProducts()), posterior.solves
    prior, projection = joint.test_test.diagonal(dim1=-2, dim2=-1), solves.projection()
    variance = projection.variance(prior, joint.test_train)
    found = variance_error.lower_variance_error(solves.system, projection, variance, prior, joint.test_train)
    assert share * float(errors.median()) < found.median <= float(errors.median()) + 1e-9


def test_factors_of_a_batch_count_together() -> None:
    case = CASES["batch"]()
    members, size = case.y.shape
    for bound, is_exact in ((size, False), (int(members**0.5 * size) + 1, True)):
        posterior = PathwisePosterior(case.model, case.likelihood, solver=ConjugateGradients(), exact_below=bound)
        assert isinstance(posterior.solves.projection(), ExactProjection) is is_exact


def test_default_settings_are_accurate() -> None:
    """Two dimensions and small noise, where random features fail: far within a median |log ratio| of 0.1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 2, generator=generator, dtype=torch.float64)
    case = CASES["matern-3/2"]()
    kernel = case.model.covar_module
    kernel.base_kernel = type(kernel.base_kernel)(nu=1.5).double()
    kernel.base_kernel.initialize(lengthscale=0.2)
    kernel.initialize(outputscale=1.0)
    case.likelihood.initialize(noise=0.01)
    case.model.set_train_data(x, torch.sin(6 * x.sum(-1)), strict=False)
    for rank, bound in ((1024, 1e-6), (100, 0.1)):
        posterior = PathwisePosterior(
            case.model, case.likelihood, exact_below=0, solver=ConjugateGradients(), rank=rank
        )
        error = posterior.variance_error(torch.rand(200, 2, generator=generator, dtype=torch.float64))
        assert error.median < bound

"""The average information against dense twins."""

from collections.abc import Callable
from dataclasses import replace

import gpytorch
import pytest
import torch

import gpy_iterative as gpi
from gpy_iterative.fitting.coordinates import Coordinates
from gpy_iterative.fitting.steps.curvature import Curvature, average_information, gradient_noise, prior_information
from gpy_iterative.fitting.steps.directional import directional_product
from gpy_iterative.linear_operators.from_gpytorch import operator_of_kernel
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_operators.radial.functions import MATERN
from gpy_iterative.linear_operators.radial.operator import RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.training.likelihood_params import likelihood_arguments
from tests.exact.gaussian_models import CASES, Case, Regression, data
from tests.fitting.problems import ITERATIVE, LOW_RANK, TIGHT, dense_information, regression

#: Kernels in closed form; others are central differences, or GPyTorch's dense twin of one input loses digits.
CLOSED = [
    "rbf",
    "matern-1/2",
    "matern-3/2",
    "matern-5/2",
    "rational-quadratic",
    "unscaled",
    "additive",
    "separable",
    "batch",
    "batch-of-products",
    "fixed-noise",
    "priors",
    "sum-in-forward",
    "dirichlet-classification",
    "heteroskedastic",
]
OTHERS = [name for name in CASES if name not in CLOSED and name != "borrowed tensors"]


def curvature(mll: gpi.mlls.HutchinsonMarginalLogLikelihood, coordinates: Coordinates, **options: object) -> Curvature:
    mll.train()
    model = mll.model
    evaluation = mll.evaluate(model(*model.train_inputs), model.train_targets, *likelihood_arguments(mll))
    return average_information(mll, evaluation, coordinates, generator=torch.Generator(), **options)


@pytest.mark.parametrize(("name", "tolerance"), [*((n, 1e-8) for n in CLOSED), *((n, 1e-4) for n in OTHERS)])
def test_every_kind_of_model(name: str, tolerance: float) -> None:
    check_information(CASES[name](), tolerance)


@pytest.mark.parametrize(("batch", "of_kernel"), [((2,), ()), ((2,), (1,)), ((2, 3), (2, 1)), ((2, 3), (3,))])
def test_a_batch_of_noises_shares_a_kernel(batch: tuple[int, ...], of_kernel: tuple[int, ...]) -> None:
    x, y = data()
    shape, shared = torch.Size(batch), torch.Size(of_kernel)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=shape)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel(batch_shape=shared), batch_shape=shared)
    targets = torch.stack([y.roll(i) for i in range(shape.numel())]).view(*shape, -1)
    model = Regression(x, targets, likelihood, kernel, batch).double()
    likelihood.noise = torch.linspace(0.1, 0.4, shape.numel()).view(*shape, 1)
    check_information(Case(model, likelihood, x, targets), 1e-8)


def check_information(case: Case, tolerance: float) -> None:
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    coordinates = Coordinates(mll)
    found = curvature(mll, coordinates).matrix - prior_information(mll, coordinates, mll.report.value.shape)
    expected = dense_information(case, coordinates)
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def test_one_factor_serves_an_exact_evaluation_and_its_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    factorize, found = gpi.solvers.Cholesky.factorize, []

    def counted(self: gpi.solvers.Cholesky, operator: object) -> object:
        found.append(factorize(self, operator))
        return found[-1]

    monkeypatch.setattr(gpi.solvers.Cholesky, "factorize", counted)
    mll = regression()
    curvature(mll, Coordinates(mll))
    assert len(found) == 1


def test_one_preconditioner_serves_an_evaluation_and_its_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, built = gpi.preconditioners.RandomlyPivotedCholesky, []
    build = recipe.build
    monkeypatch.setattr(recipe, "build", lambda *given, **named: built.append(None) or build(*given, **named))
    mll = regression(solver=gpi.solvers.ConjugateGradients(preconditioner=recipe(rank=20)))
    assert curvature(mll, Coordinates(mll)).epochs > 0
    assert len(built) == 1


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    mll = regression()
    case = Case(mll.model, mll.likelihood, *mll.model.train_inputs, mll.model.train_targets)
    return dense_information(case, Coordinates(mll))


def test_a_tight_solve_gives_the_dense_matrix(expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpy_iterative.fitting.steps.curvature.TOLERANCE", 1e-8)
    mll = regression(solver=TIGHT)
    found = curvature(mll, Coordinates(mll)).matrix
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("solver", [ITERATIVE, gpi.solvers.AlternatingProjections()], ids=["own", "other"])
def test_loose_solves_are_close(expected: torch.Tensor, solver: gpi.solvers.Solver) -> None:
    mll = regression(solver=solver)
    found = curvature(mll, Coordinates(mll))
    assert 0 < found.epochs < 30
    scale = expected.diagonal().rsqrt()
    assert (scale.unsqueeze(-1) * (found.matrix - expected) * scale).abs().max() < 0.05


def on_a_ridge(**options: object) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    """Long lengthscales and little noise: data see outputscale over lengthscales cubed, and hardly anything else."""
    mll = regression(**options)
    mll.likelihood.noise, mll.model.covar_module.outputscale = 1.01e-4, 1000.0
    mll.model.covar_module.base_kernel.lengthscale = 20.0
    return mll


def test_loose_solves_are_close_along_a_ridge_where_derivatives_cancel() -> None:
    """Solutions for each derivative left 4% of this curvature; predicted gains were hundreds of times too large."""
    exact, mll = on_a_ridge(), on_a_ridge(solver=ITERATIVE)
    expected, found = (curvature(each, Coordinates(each)).matrix for each in (exact, mll))
    scale = expected.diagonal().rsqrt()
    values, vectors = torch.linalg.eigh(scale.unsqueeze(-1) * expected * scale)
    assert values[0] < 1e-4
    ridge = scale * vectors[:, 0]
    assert 0.8 < float(ridge @ found @ ridge / values[0]) < 1.0001


@pytest.mark.parametrize("tolerance", [0.9, 0.5, 0.1])
def test_a_loose_solve_leaves_a_semi_definite_matrix_that_is_never_too_large(
    expected: torch.Tensor, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpy_iterative.fitting.steps.curvature.TOLERANCE", tolerance)
    mll = regression(solver=replace(TIGHT, preconditioner=None))
    found = curvature(mll, Coordinates(mll)).matrix
    assert torch.linalg.eigvalsh(found).min() > -1e-9
    assert torch.linalg.eigvalsh(expected - found).min() > -1e-6


def test_a_good_start_saves_epochs() -> None:
    mll = regression(solver=ITERATIVE)
    coordinates = Coordinates(mll)
    first = curvature(mll, coordinates)
    assert curvature(mll, coordinates, initial_guess=first.solutions).epochs < first.epochs


def test_the_correction_removes_the_residual_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpy_iterative.fitting.steps.curvature.TOLERANCE", 1e-6)
    gradients = []
    for tolerance in (1e-8, 0.1):
        mll = regression(solver=replace(LOW_RANK, tolerance=tolerance, probe_tolerance=1e-9))
        coordinates, model = Coordinates(mll.train()), mll.model
        evaluation = mll.evaluate(model(*model.train_inputs), model.train_targets)
        gradient = coordinates.gradient(evaluation.value * 300, retain_graph=True)
        found = average_information(mll, evaluation, coordinates, generator=torch.Generator())
        gradients.append((gradient, gradient + found.correction))
    (exact, _), (rough, corrected) = gradients
    assert (corrected - exact).norm() < 0.05 * (rough - exact).norm()


def test_a_linear_parametrisation_has_the_mean_of_observed_and_expected_information() -> None:
    """Variances enter H linearly: A is the mean of both, of which autograd gives one, and a dense trace the other."""
    mll = regression(60)
    coordinates = Coordinates(mll)
    found = curvature(mll, coordinates).matrix
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    mll.model.covar_module.base_kernel.requires_grad_(False)
    base = mll.model.covar_module.base_kernel(x).to_dense().detach()
    parts = [torch.eye(60, dtype=torch.float64), base]
    variances = torch.stack([mll.likelihood.noise.squeeze(), mll.model.covar_module.outputscale]).detach()
    residual = y - mll.model.mean_module(x).detach()

    def value(variances: torch.Tensor) -> torch.Tensor:
        matrix = sum(v * part for v, part in zip(variances, parts, strict=True))
        return -0.5 * (residual @ torch.linalg.solve(matrix, residual) + torch.logdet(matrix))

    observed = -torch.autograd.functional.hessian(value, variances)
    inverse = torch.linalg.inv(sum(v * part for v, part in zip(variances, parts, strict=True)))
    expected = torch.stack([torch.stack([0.5 * (inverse @ a @ inverse @ b).trace() for a in parts]) for b in parts])
    index = torch.tensor([coordinates.names.index(n) for n in ("noise_covar.noise", "covar_module.outputscale")])
    of_logarithms = (observed + expected) / 2 * variances.unsqueeze(-1) * variances
    assert torch.allclose(found[index.unsqueeze(-1), index], of_logarithms, rtol=1e-6)


def test_priors_add_the_positive_part_of_their_curvature() -> None:
    case = CASES["priors"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    found = prior_information(mll, Coordinates(mll), torch.Size())
    assert torch.linalg.eigvalsh(found).min() > -1e-12
    # A Gamma prior on the logarithm has the curvature rate * value, wherever it is.
    values = case.model.covar_module.base_kernel.lengthscale.detach().flatten()
    index = [Coordinates(mll).names.index(f"covar_module.base_kernel.lengthscale[{k}]") for k in range(3)]
    assert torch.allclose(found.diagonal()[index], 6.0 * values)


def test_gradient_noise_has_the_size_of_the_gradients_error() -> None:
    errors, noises = [], []
    for seed in range(10):
        mll = regression(100, generator=seed, num_probes=8).variant(solver=TIGHT)  # as in fits, no control variate
        coordinates = Coordinates(mll.train())
        evaluation = mll.evaluate(mll.model(*mll.model.train_inputs), mll.model.train_targets)
        errors.append(coordinates.gradient(evaluation.value * 100, retain_graph=True))
        noises.append(gradient_noise(evaluation, coordinates).square().mean(0))
    spread, told = torch.stack(errors).var(0).sum(), torch.stack(noises).mean(0).sum()
    assert 0.4 < float(told / spread) < 2.5


def test_an_exact_gradient_has_no_noise() -> None:
    mll = regression(50)
    coordinates = Coordinates(mll.train())
    evaluation = mll.evaluate(mll.model(*mll.model.train_inputs), mll.model.train_targets)
    assert gradient_noise(evaluation, coordinates) is None


def test_tensors_from_elsewhere_are_refused() -> None:
    case = CASES["borrowed tensors"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    with pytest.raises(NotImplementedError, match="register them"):
        curvature(mll, Coordinates(mll))


def test_inputs_of_a_product_that_a_network_moves() -> None:
    """No scale moves them so: differences of the whole product, whose factors are functions of one input each."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    first, second = (
        gpytorch.kernels.RBFKernel(active_dims=(0,)),
        gpytorch.kernels.MaternKernel(nu=1.5, active_dims=(1,)),
    )
    operator = operator_of_kernel((first * second).double(), draw(20, 2), None, KernelProducts())
    assert isinstance(operator, RadialProductLinearOperator)
    vector, tensors, tree = draw(20), operator.representation(), operator.representation_tree()
    moves = [draw(*tensor.shape) if tensor.dim() else None for tensor in tensors]  # of inputs, not of scales
    moved = lambda step: [t if m is None else t + step * m for t, m in zip(tensors, moves, strict=True)]
    ends = [tree(*moved(step)) for step in (1e-5, -1e-5)]
    expected = (ends[0].to_dense() - ends[1].to_dense()) @ vector / 2e-5
    found = directional_product(operator, vector).along(moves)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)


def test_short_lengthscales_keep_their_digits_in_float32() -> None:
    """Coordinates over hundreds of lengthscales are taken apart, from differences."""
    found = []
    for dtype in (torch.float64, torch.float32):
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(700, 2, generator=generator, dtype=torch.float64)
        vector = torch.randn(700, generator=generator, dtype=torch.float64).to(dtype)
        scales = torch.tensor([0.001, 0.5], dtype=torch.float64)
        scaled = ((x - x.mean(0)) / scales).to(dtype)
        operator = RadialKernelLinearOperator(scaled, torch.tensor(2.0, dtype=dtype), function=MATERN[1.5])
        assert bool(operator.tiles().distances.apart) is (dtype is torch.float32)
        found.append(operator.scale_products(vector).double())
        step = 1e-4
        if dtype is torch.float64:
            for coordinate in range(2):
                factor = torch.ones(2, dtype=dtype)
                factor[coordinate] = 1 + step
                above = RadialKernelLinearOperator(scaled * factor, operator.outputscale, function=MATERN[1.5]) @ vector
                factor[coordinate] = 1 - step
                below = RadialKernelLinearOperator(scaled * factor, operator.outputscale, function=MATERN[1.5]) @ vector
                assert torch.allclose(found[0][:, coordinate], (above - below) / (2 * step), atol=1e-4)
    assert (found[1] - found[0]).abs().max() < 1e-3 * found[0].abs().max()


@pytest.mark.parametrize(
    "covariance",
    [
        lambda: gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=3)),
        lambda: gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel() * gpytorch.kernels.PeriodicKernel()),
        lambda: gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel() * gpytorch.kernels.LinearKernel()),
    ],
    ids=["closed form", "periodic", "differences"],
)
def test_float32(covariance: Callable[[], gpytorch.kernels.Kernel]) -> None:
    mll = regression(200, covariance=covariance())
    single = gpytorch.Module.float(regression(200, covariance=covariance(), solver=ITERATIVE))
    data = (*single.model.train_inputs, single.model.train_targets)
    single.model.set_train_data(*(tensor.float() for tensor in data), strict=False)
    for each in (mll, single):
        each.likelihood.noise, each.model.covar_module.outputscale = 0.05, 5.0
    exact = curvature(mll, Coordinates(mll)).matrix
    assert (curvature(single, Coordinates(single)).matrix - exact).abs().max() < 0.05 * exact.abs().max()


def test_missing_targets_of_several_outputs() -> None:
    """The mask of a covariance stays a mask in float64."""
    case = CASES["multitask"]()
    targets = case.y.clone()
    targets[::3, 0] = torch.nan
    case.model.set_train_data(targets=targets, strict=False)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)
    with gpytorch.settings.observation_nan_policy("mask"):
        found = curvature(mll, Coordinates(mll)).matrix
    assert found.isfinite().all()
    assert torch.linalg.eigvalsh(found).min() > -1e-8

"""Kinds of models whose inputs, targets or warnings are special: trained and predicted as GPyTorch would, or refused."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    HadamardGaussianLikelihood,
)
from linear_operator.operators import MaskedLinearOperator
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import AlternatingProjections, Cholesky, ConjugateGradients
from tests.exact.gaussian_models import CASES, Case, Regression, data
from tests.exact.prediction.test_posterior import held_out_points
from tests.monte_carlo import assert_within

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning"),  # sparse matrices of linear_operator
    pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # GPyTorch's structure kernels
    pytest.mark.filterwarnings("ignore:.*replaced by:DeprecationWarning"),
]


@dataclass(frozen=True)
class Kind:
    """A model with any number of inputs.

    Attributes:
        inputs, test_inputs: one tensor for each of the model's inputs.
        params: what the mll's likelihood is called with.
    """

    model: gpytorch.models.ExactGP
    likelihood: Any
    inputs: tuple[Tensor, ...]
    targets: Tensor
    test_inputs: tuple[Tensor, ...]
    params: tuple[Any, ...] = ()

    def to(self, dtype: torch.dtype) -> "Kind":
        """The same model and data in another precision."""
        model, likelihood = copy.deepcopy((self.model, self.likelihood))
        inputs, test_inputs, params = (
            tuple(x.to(dtype) if x.is_floating_point() else x for x in part)
            for part in (self.inputs, self.test_inputs, self.params)
        )
        targets = self.targets.to(dtype)
        model.set_train_data(inputs, targets, strict=False)
        return Kind(model.to(dtype), likelihood.to(dtype), inputs, targets, test_inputs, params)


class TaskIndices(gpytorch.models.ExactGP):
    """Inputs and task indices; the matrix of tasks is multiplied in `forward`, as in GPyTorch's tutorial."""

    def __init__(self, inputs: tuple[Tensor, Tensor], y: Tensor, likelihood: Any):
        super().__init__(inputs, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernels.RBFKernel()
        self.task_covar_module = kernels.IndexKernel(num_tasks=2, rank=1)

    def forward(self, x: Tensor, index: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).mul(self.task_covar_module(index)))


class MaskedInForward(Regression):
    """Every other row of a covariance of twice the data."""

    def forward(self, x: Tensor) -> MultivariateNormal:
        doubled = x.repeat_interleave(2, dim=-2)
        mask = torch.arange(doubled.shape[-2]) % 2 == 0
        return MultivariateNormal(self.mean_module(x), MaskedLinearOperator(self.covar_module(doubled), mask, mask))


class DeepGridInterpolation(Regression):
    """A network, scaled to the bounds of a grid."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: kernels.Kernel):
        super().__init__(x, y, likelihood, kernel)
        self.network = torch.nn.Linear(x.shape[-1], 2)
        weights = torch.linspace(-1, 1, self.network.weight.numel()).reshape(self.network.weight.shape)
        self.network.load_state_dict({"weight": weights, "bias": torch.zeros(2)})
        self.scale_to_bounds = gpytorch.utils.grid.ScaleToBounds(-1.0, 1.0)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return super().forward(self.scale_to_bounds(self.network(x)))


def _kind(
    kernel: kernels.Kernel,
    transform: Callable[[Tensor], Tensor] = lambda x: x,
    model_class: type[Regression] = Regression,
    likelihood: Any = None,
) -> Kind:
    x, y = data(30)
    x, test = transform(x), transform(held_out_points(6))
    likelihood = GaussianLikelihood() if likelihood is None else likelihood
    return Kind(model_class(x, y, likelihood, kernel).double(), likelihood, (x,), y, (test,))


def _with_task(x: Tensor, num_tasks: int = 2) -> Tensor:
    return torch.cat([x, (torch.arange(x.shape[0]) % num_tasks).unsqueeze(-1).to(x)], dim=-1)


def _task_indices() -> Kind:
    x, y = data(30)
    index, test_index = (torch.arange(size).unsqueeze(-1) % 2 for size in (30, 6))
    likelihood = GaussianLikelihood()
    model = TaskIndices((x, index), y, likelihood).double()
    return Kind(model, likelihood, (x, index), y, (held_out_points(6), test_index))


def _noise_of_tasks() -> Kind:
    likelihood = HadamardGaussianLikelihood(num_tasks=3, task_feature_index=3)
    likelihood.noise = torch.tensor([0.1, 0.3, 0.5])
    kernel = kernels.RBFKernel(active_dims=(0, 1, 2)) * kernels.IndexKernel(num_tasks=3, rank=1, active_dims=(3,))
    kind = _kind(kernel, lambda x: _with_task(x, 3), likelihood=likelihood)
    return Kind(kind.model, likelihood, kind.inputs, kind.targets, kind.test_inputs, kind.inputs)


def _grid(kernel: kernels.Kernel, num_dims: int = 1) -> kernels.Kernel:
    return kernels.GridInterpolationKernel(kernel, grid_size=8, grid_bounds=((-2.2, 2.2),) * num_dims)


def _one_hot(x: Tensor) -> Tensor:
    return torch.nn.functional.one_hot((x.abs() * 1.4).long().clamp_max(2), 3).flatten(-2).to(x)


def _scale(kernel: kernels.Kernel) -> kernels.Kernel:
    return kernels.ScaleKernel(kernel)


KINDS: dict[str, Callable[[], Kind]] = {
    "task-indices": _task_indices,
    "noise-of-tasks": _noise_of_tasks,
    "masked-in-forward": lambda: _kind(_scale(kernels.RBFKernel()), model_class=MaskedInForward),
    "cylindrical": lambda: _kind(kernels.CylindricalKernel(3, _scale(kernels.MaternKernel())), lambda x: x / 4),
    "hamming": lambda: _kind(_scale(kernels.HammingIMQKernel(vocab_size=3)), _one_hot),
    "distributions": lambda: _kind(
        kernels.DistributionalInputKernel(distance_function=lambda x1, x2: torch.cdist(x1, x2).square())
    ),
    "arc": lambda: _kind(_scale(kernels.ArcKernel(kernels.MaternKernel(nu=2.5), ard_num_dims=3))),
    "cosine": lambda: _kind(_scale(kernels.CosineKernel(active_dims=(0,)))),
    "polynomial": lambda: _kind(kernels.PolynomialKernel(2) + kernels.ConstantKernel()),
    "deep-features": lambda: _kind(
        gpi.kernels.DeepFeatureKernel(
            torch.nn.Linear(3, 2), _scale(kernels.LinearKernel()) + _scale(kernels.PolynomialKernel(2))
        )
    ),
    "additive-structure": lambda: _kind(kernels.AdditiveStructureKernel(_scale(kernels.RBFKernel()), num_dims=3)),
    "product-structure": lambda: _kind(_scale(kernels.ProductStructureKernel(kernels.RBFKernel(), num_dims=3))),
    "newton-girard": lambda: _kind(kernels.NewtonGirardAdditiveKernel(kernels.RBFKernel(), num_dims=3, max_degree=2)),
    "grid-interpolation": lambda: _kind(_scale(_grid(kernels.RBFKernel(), 3))),
    "additive-grid-interpolation": lambda: _kind(
        kernels.AdditiveStructureKernel(_scale(_grid(kernels.RBFKernel())), num_dims=3)
    ),
    "deep-grid-interpolation": lambda: _kind(
        kernels.GridInterpolationKernel(_scale(kernels.RBFKernel()), grid_size=10, num_dims=2),
        model_class=DeepGridInterpolation,
    ),
}
# Their inputs are single tensors too; their float32 is what is wanted here.
FLOAT32 = [*KINDS, "coregionalization", "derivatives", "independent-outputs", "summed-batch", "batch-of-products"]


def kind_of(name: str) -> Kind:
    if name in KINDS:
        return KINDS[name]()
    case = CASES[name]()
    return Kind(case.model, case.likelihood, (case.x,), case.y, (held_out_points(6),), case.params)


def value_and_gradients(mll: gpytorch.mlls.MarginalLogLikelihood, kind: Kind) -> tuple[Tensor, dict[str, Tensor]]:
    kind.model.train()
    kind.likelihood.train()
    kind.model.zero_grad()
    value = mll(kind.model(*kind.inputs), kind.targets, *kind.params)
    value.sum().backward()
    return value.detach(), {name: p.grad.clone() for name, p in kind.model.named_parameters() if p.grad is not None}


def stock(kind: Kind) -> tuple[Tensor, dict[str, Tensor]]:
    with dense_algebra():
        return value_and_gradients(gpytorch.mlls.ExactMarginalLogLikelihood(kind.likelihood, kind.model), kind)


def dense_algebra() -> AbstractContextManager[None]:
    return gpytorch.settings.fast_computations(False, False, False)


def stock_prediction(kind: Kind) -> tuple[Tensor, Tensor]:
    model = copy.deepcopy(kind.model).train().eval()
    for module in model.modules():
        if isinstance(module, kernels.GridInterpolationKernel):
            module.grid_is_dynamic = False  # GPyTorch would have another grid for K(x, x)
    with torch.no_grad(), dense_algebra():
        latent = model(*kind.test_inputs)
        return latent.mean, latent.covariance_matrix


@pytest.mark.parametrize("name", KINDS)
def test_exact_path_equals_gpytorch(name: str) -> None:
    kind = KINDS[name]()
    expected, expected_gradients = stock(kind)
    mll = gpi.mlls.PathwiseMarginalLogLikelihood(kind.likelihood, kind.model)
    value, gradients = value_and_gradients(mll, kind)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[parameter], rtol=1e-6, atol=1e-7, msg=lambda m, p=parameter: f"{p}: {m}"
        )
    mean, covariance = stock_prediction(kind)
    posterior = mll.posterior()
    with torch.no_grad():
        for latent in (posterior(*kind.test_inputs), kind.model(*kind.test_inputs)):
            torch.testing.assert_close(latent.mean, mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(latent.covariance_matrix, covariance, rtol=1e-6, atol=1e-6)
            if name == "deep-grid-interpolation":
                break  # GPyTorch has a grid of its own for K(x, x)


SOLVED = [*KINDS, "coregionalization", "independent-outputs", "batch-of-products"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "solver"),
    [
        *((name, ConjugateGradients(tolerance=1e-8)) for name in SOLVED),
        *((name, AlternatingProjections(tolerance=1e-6, block_size=16)) for name in SOLVED[::2]),
    ],
)
def test_iterative_solvers(name: str, solver: gpi.solvers.Solver) -> None:
    kind = kind_of(name)
    expected, expected_gradients = stock(kind)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        kind.likelihood, kind.model, num_probes=2048, solver=solver, generator=0
    )
    value, gradients = value_and_gradients(mll, kind)
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
    assert_within(value, expected, mll.report.value_sem, max_sem=0.02, floor=1e-5)
    total = lambda vectors: torch.cat([vector.flatten() for vector in vectors]).norm()
    difference = total([gradients[name] - expected_gradients[name] for name in expected_gradients])
    assert difference <= 0.15 * total(expected_gradients.values())
    mean, covariance = stock_prediction(kind)
    with torch.no_grad():
        latent = mll.posterior()(*kind.test_inputs)
        torch.testing.assert_close(latent.mean, mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(latent.covariance_matrix, covariance, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FLOAT32)
def test_float32(name: str) -> None:
    double = kind_of(name)
    single = double.to(torch.float32)
    expected, expected_gradients = stock(double)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(single.likelihood, single.model)
    value, gradients = value_and_gradients(mll, single)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-3, atol=1e-4)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient.double(), expected_gradients[parameter], rtol=1e-2, atol=2e-3)
    with torch.no_grad():
        latent = mll.posterior()(*single.test_inputs)
    assert latent.mean.dtype == torch.float32
    torch.testing.assert_close(latent.mean.double(), stock_prediction(double)[0], rtol=1e-2, atol=2e-3)


# Missing data


MISSING = {
    "matern-3/2": (3, 17),
    "multitask": ((3, 8), (1, 0)),
    "multitask-low-rank-noise": ((3, 8), (1, 0)),
    "coregionalization": ((3, 8), (1, 0)),
    "independent-outputs": ((3, 8), (1, 0)),
    "sum-in-forward": (3, 17),
    "summed-batch": (3, 17),
    "batch": ((0, 1), (3, 5)),
}


def missing(name: str) -> Case:
    case = CASES[name]()
    y = case.y.clone()
    index = MISSING[name]
    y[tuple(map(torch.tensor, index)) if isinstance(index[0], tuple) else torch.tensor(index)] = torch.nan
    case.model.set_train_data(targets=y)
    return Case(case.model, case.likelihood, case.x, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("solver", [None, ConjugateGradients(tolerance=1e-8)])
def test_missing_targets_are_dropped_from_every_kind(name: str, solver: gpi.solvers.Solver | None) -> None:
    case = missing(name)
    kind = Kind(case.model, case.likelihood, (case.x,), case.y, (held_out_points(6),))
    with gpytorch.settings.observation_nan_policy("mask"):
        expected, expected_gradients = stock(kind)
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
            case.likelihood, case.model, solver=solver, num_probes=512, generator=0
        )
        value, gradients = value_and_gradients(mll, kind)
        if solver is None:
            for parameter, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected_gradients[parameter], rtol=1e-7, atol=1e-8)
        assert_within(value, expected, mll.report.value_sem, max_sem=0.02, floor=1e-7)
        latent = mll.posterior()(*kind.test_inputs)
        # GPyTorch's mean is right; its variance counts missing data as observed.
        torch.testing.assert_close(latent.mean, stock_prediction(kind)[0], rtol=1e-6, atol=1e-6)
        mean, covariance = conditional_on_observed(kind)
        torch.testing.assert_close(latent.mean.flatten(-latent.mean.dim() + mean.dim() - 1), mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(latent.covariance_matrix, covariance, rtol=0, atol=1e-6)


@torch.no_grad()
def conditional_on_observed(kind: Kind) -> tuple[Tensor, Tensor]:
    """Flat mean [*b, t] and covariance [*b, t, t], dense."""
    kind.model.eval()
    train = gpytorch.Module.__call__(kind.model, *kind.inputs)
    joint = gpytorch.Module.__call__(kind.model, torch.cat([kind.inputs[0], kind.test_inputs[0]]))
    size, matrix = train.loc.shape[-1], joint.lazy_covariance_matrix.to_dense()
    targets = kind.targets.reshape(train.loc.shape)
    observed = ~targets.reshape(-1, size).isnan().any(0)
    system = kind.likelihood(train, *kind.params).lazy_covariance_matrix.to_dense()[..., observed, :][..., observed]
    cross = matrix[..., size:, :size][..., observed]
    residual = (targets - train.loc)[..., observed].unsqueeze(-1)
    mean = joint.loc[..., size:] + (cross @ torch.linalg.solve(system, residual)).squeeze(-1)
    return mean, matrix[..., size:, size:] - cross @ torch.linalg.solve(system, cross.mT)


def test_predictions_under_fill_are_those_under_mask() -> None:
    case = missing("multitask")
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    predictions = {}
    for policy in ("mask", "fill"):
        with gpytorch.settings.observation_nan_policy(policy), torch.no_grad():
            predictions[policy] = mll.posterior()(held_out_points(6))
            predictions[policy].covariance_matrix  # noqa: B018  evaluated under the policy
    torch.testing.assert_close(predictions["fill"].mean, predictions["mask"].mean)
    torch.testing.assert_close(predictions["fill"].variance, predictions["mask"].variance)


def test_fill_refuses_a_batch_whose_members_miss_different_data() -> None:
    case = missing("batch")
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    with gpytorch.settings.observation_nan_policy("fill"), pytest.raises(ValueError, match="'mask'"):
        mll.posterior()


# Refusals


def test_likelihood_with_missing_observations_names_the_setting_that_replaced_it() -> None:
    x, y = data(20)
    y[3] = torch.nan
    likelihood = GaussianLikelihoodWithMissingObs()
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    with pytest.raises(ValueError, match=r"target\[3\].*observation_nan_policy\('mask'\)"):
        mll(model(x), y)


@pytest.mark.parametrize("name", ["noise-of-tasks", "heteroskedastic"])
def test_noise_that_depends_on_inputs_asks_for_them(name: str) -> None:
    kind = kind_of(name)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(kind.likelihood, kind.model)
    with pytest.raises(ValueError, match=r"mll\(model\(x\), y, x\)"):
        mll(kind.model(*kind.inputs), kind.targets)


def test_fixed_noise_of_another_size_is_not_left_out_beside_a_learned_one() -> None:
    x, y = data(20)
    likelihood = FixedNoiseGaussianLikelihood(torch.full((7,), 0.1).double(), learn_additional_noise=True)
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model)
    with pytest.raises(ValueError, match="7 fixed noise"):
        mll(model(x), y)


def test_inputs_of_other_data_are_refused() -> None:
    kind = kind_of("heteroskedastic")
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(kind.likelihood, kind.model)
    with pytest.raises(ValueError, match="same data"):
        mll(kind.model(*kind.inputs), kind.targets, held_out_points(6))


@pytest.mark.parametrize("name", [*CASES, *KINDS])
def test_nothing_is_solved_twice_for_an_unchanged_model(name: str) -> None:
    """The kind "cosine" has one buffer twice: ScaleKernel takes `active_dims` from its base kernel."""
    kind = kind_of(name)
    posterior = PathwisePosterior(kind.model, kind.likelihood, solver=Cholesky())
    solves = posterior.solves
    _ = posterior(*kind.test_inputs).mean
    assert posterior.solves is solves


def test_models_in_a_list_share_one_loss() -> None:
    kinds = [kind_of("matern-3/2"), kind_of("product")]
    models = gpytorch.models.IndependentModelList(*(kind.model for kind in kinds))
    likelihood = gpytorch.likelihoods.LikelihoodList(*(kind.likelihood for kind in kinds))
    values = []
    for mll_class in (gpytorch.mlls.ExactMarginalLogLikelihood, gpi.mlls.HutchinsonMarginalLogLikelihood):
        mll = gpytorch.mlls.SumMarginalLogLikelihood(likelihood, models, mll_cls=mll_class)
        with dense_algebra() if mll_class is gpytorch.mlls.ExactMarginalLogLikelihood else nullcontext():
            value = mll(models(*models.train_inputs), models.train_targets)
            value.backward()
        values.append(value.detach())
    torch.testing.assert_close(values[1], values[0])
    posteriors = [part.posterior() for part in mll.mlls]
    predictions = models.eval()(held_out_points(6), held_out_points(6))
    for posterior, prediction in zip(posteriors, predictions, strict=True):
        torch.testing.assert_close(posterior(held_out_points(6)).mean, prediction.mean)

"""Threads that share a posterior: what one of them asks for changes neither another's answer nor the model."""

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.features.weight_space.posterior import WeightSpacePosterior
from gpy_iterative.linear_operators.kernel_functions import GPYTORCH_SETTINGS
from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import ConjugateGradients
from tests.exact.gaussian_models import CASES, Case, data, regression

THREADS = 8


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


BOUNDS = [(-2.5, 2.5)] * 3


def _grid() -> Case:
    axis = torch.linspace(-2, 2, 6, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    case = regression(kernels.GridKernel(kernels.RBFKernel(), grid=[axis, axis]))
    case.model.set_train_data(points, points.sin().sum(-1), strict=False)
    return case


def _categories() -> Case:
    case = regression(kernels.HammingIMQKernel(vocab_size=5))
    one_hot = torch.nn.functional.one_hot((case.x + 2).round().long(), 5).flatten(1)
    case.model.set_train_data(one_hot.to(case.x), case.y, strict=False)
    return case


def _in_a_ball() -> Case:
    case = regression(kernels.CylindricalKernel(4, kernels.MaternKernel(nu=2.5)))
    case.model.set_train_data(case.x / 4, case.y)
    return case


def _dropout() -> Case:
    case = CASES["deep"]()
    case.model.network.append(torch.nn.Dropout(0.5))
    return case


KERNELS: dict[str, Callable[[], Case]] = CASES | {
    "arc": lambda: regression(kernels.ArcKernel(kernels.MaternKernel(nu=2.5), ard_num_dims=3)),
    "constant": lambda: regression(kernels.ConstantKernel() + kernels.RBFKernel()),
    "cosine": lambda: regression(kernels.CosineKernel(active_dims=(0,)) * kernels.RBFKernel()),
    "cylindrical": _in_a_ball,
    "dropout": _dropout,
    "grid": _grid,
    "grid-interpolation": lambda: regression(
        kernels.GridInterpolationKernel(kernels.RBFKernel(), grid_size=6, grid_bounds=BOUNDS)
    ),
    "hamming": _categories,
    "newton-girard": lambda: regression(
        kernels.NewtonGirardAdditiveKernel(kernels.RBFKernel(ard_num_dims=3), num_dims=3, max_degree=2)
    ),
    "polynomial": lambda: regression(kernels.PolynomialKernel(power=2)),
    "structure": lambda: regression(kernels.AdditiveStructureKernel(kernels.RBFKernel(), num_dims=3)),
    "spectral-delta": lambda: regression(kernels.SpectralDeltaKernel(num_dims=3, num_deltas=20)),
}
#: Noise that is another model's posterior, which GPyTorch computes; a kernel that enters the setting itself.
CHANGE_SETTINGS = ("heteroskedastic", "cylindrical")


def state(*roots: torch.nn.Module) -> list[Any]:
    """What a prediction may not touch: modes, and tensors by identity, version and whether they have gradients."""
    modules = [module for root in roots for module in root.modules()]
    tensors = [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
    return [
        *((id(module), module.training, sorted(vars(module))) for module in modules),
        *((id(tensor), tensor._version, tensor.requires_grad, type(tensor)) for tensor in tensors),
    ]


def in_threads(work: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    """The work of each thread, all of which begin at once."""
    barrier = threading.Barrier(THREADS)

    def run(number: int) -> list[Tensor]:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def forbid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPyTorch's settings are the whole process's: whoever enters one changes what all threads compute."""

    def refuse(self: Any, *args: Any) -> None:
        raise AssertionError("A prediction has changed a setting of the process.")

    monkeypatch.setattr(gpytorch.settings.lazily_evaluate_kernels, "__enter__", refuse)


def forbid_unlocked_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that a kernel or a noise enters itself are entered by one thread at a time."""
    enter = gpytorch.settings.lazily_evaluate_kernels.__enter__

    def locked(self: Any, *args: Any) -> None:
        assert GPYTORCH_SETTINGS._is_owned()
        enter(self, *args)

    monkeypatch.setattr(gpytorch.settings.lazily_evaluate_kernels, "__enter__", locked)


def points(number: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(5, like.shape[-1], generator=generator, dtype=like.dtype) * like.abs().amax()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # GPyTorch's own; filters, too, are the whole process's
@pytest.mark.parametrize("name", KERNELS)
def test_eight_threads_predict_as_one_does_and_leave_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive together where everything has yet to be solved; the model is in training mode all the while."""
    case = KERNELS[name]()
    model, likelihood = case.model, case.likelihood
    posterior = PathwisePosterior(model, likelihood, params=case.params, num_frequencies=50)
    for parameter in model.parameters():
        parameter.data.add_(0.01)
    model.train()
    inputs, before = [points(number, model.train_inputs[0]) for number in range(THREADS)], state(model, likelihood)
    (forbid_unlocked_settings if name in CHANGE_SETTINGS else forbid_settings)(monkeypatch)

    def predicted(posterior: PathwisePosterior, number: int) -> list[Tensor]:
        x = inputs[number].clone().requires_grad_(number == 0)
        prediction = posterior(x)
        values = [prediction.mean.detach(), prediction.variance.detach()]
        if prediction.mean.requires_grad:
            values.append(torch.autograd.grad(prediction.mean.sum() + prediction.variance.sum(), x)[0])
        with suppress(SpectralDensityMissingError):
            values.append(posterior.sample_paths(1 + number % 3)(inputs[number]))
        return values

    found = in_threads(lambda number: predicted(posterior, number))
    assert state(model, likelihood) == before
    assert gpytorch.settings.lazily_evaluate_kernels.on()  # two threads that enter a setting at once leave it switched
    alone = PathwisePosterior(model, likelihood, params=case.params, num_frequencies=50)
    for number, values in enumerate(found):
        for value, wanted in zip(values, predicted(alone, number), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["iterative", "weights", "mode", "features"])
def test_every_posterior_serves_eight_threads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    if kind == "mode":

        class Classifier(gpi.models.IterativeLaplaceGP):
            def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
                return gpytorch.distributions.MultivariateNormal(x.new_zeros(len(x)), self.kernel(x))

        model = Classifier(x, (y > 0).long(), gpi.likelihoods.LogitBernoulliLikelihood())
        model.kernel = kernels.RBFKernel() * kernels.RBFKernel()
        model.double()
        make = lambda: gpi.prediction.LaplacePosterior(model, model.likelihood)
    elif kind == "features":
        kernel = (kernels.RBFKernel(active_dims=(0,)) * kernels.RBFKernel(active_dims=(1, 2))).double()
        model = gpi.models.QuadruplyStochasticGP(gpi.models.InducingPointBasis(kernel.requires_grad_(False), x[:20]))
        torch.nn.init.normal_(model.weights.tail_mean, generator=torch.Generator().manual_seed(0))
        make = lambda: model.posterior
    else:
        case = CASES["linear" if kind == "weights" else "product"]()
        model = case.model
        options = {"solver": ConjugateGradients(tolerance=1e-9), "exact_below": 0, "rank": 10, "num_neighbours": 10}
        make = (
            (lambda: WeightSpacePosterior(model, case.likelihood))
            if kind == "weights"
            else (lambda: PathwisePosterior(model, case.likelihood, **options))
        )
    posterior = make()
    for parameter in model.parameters():
        parameter.data.add_(0.01)
    before = state(model)
    forbid_settings(monkeypatch)

    def predicted(posterior: Any, number: int) -> list[Tensor]:
        with torch.no_grad():
            prediction = posterior(points(number, x))
            return [prediction.mean, prediction.covariance_matrix]

    found = in_threads(lambda number: predicted(posterior, number))
    assert state(model) == before
    alone = make()
    for number, values in enumerate(found):
        torch.testing.assert_close(values, predicted(alone, number), rtol=1e-5, atol=1e-6)


def test_a_posterior_with_a_lock_is_copied_and_pickled() -> None:
    case = CASES["matern-3/2"]()
    posterior = PathwisePosterior(case.model, case.likelihood, num_frequencies=20)
    x = points(0, case.x)
    wanted = posterior.sample_paths(2)(x)
    for again in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        torch.testing.assert_close(again.sample_paths(2)(x), wanted)
        again.refresh()

"""Posterior functions in the shapes, units and algorithms of BoTorch, beside its own."""

from typing import Any

import gpytorch
import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.prediction import PathwisePosterior
from tests.botorch_apart import deterministic, models, paths, search, thompson, transforms
from tests.exact.gaussian_models import data, regression
from tests.monte_carlo import assert_mean_within

BOUNDS = torch.tensor([[-20.0] * 3, [20.0] * 3], dtype=torch.float64)


def model_of(outputs: int) -> Any:
    """Inputs that are far from the unit cube, and outcomes far from standard."""
    x, y = data(30)
    y = torch.stack([y, y.flip(0)], dim=-1)[:, :outputs]
    model = models.SingleTaskGP(10 * x, 7 * y + 20, input_transform=transforms.Normalize(3))
    model.likelihood.noise = 0.1
    return model.eval()


def path_model(model: Any, count: int, num_frequencies: int = 100) -> Any:
    posterior = PathwisePosterior(model, model.likelihood, num_frequencies=num_frequencies, generator=1)
    return paths.SamplePathModel(model, posterior.sample_paths(count))


def points(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return 40 * torch.rand(*shape, 3, generator=generator, dtype=torch.float64) - 20


@pytest.mark.parametrize("outputs", [1, 2])
def test_distribution_is_that_of_the_models_posterior(outputs: int) -> None:
    model = model_of(outputs)
    functions, x = path_model(model, 1500, num_frequencies=3000), points(4)
    with torch.no_grad():
        values, posterior = functions(x), model.posterior(x)
    assert_mean_within(values, posterior.mean, max_sem=0.45)
    squares = (values - posterior.mean).square() / posterior.variance
    ones = torch.ones(4, outputs, dtype=torch.float64)
    assert_mean_within(squares, ones, max_sem=0.045)
    assert functions.posterior(x).values.shape == (1500, 1, 4, outputs)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 5), (2, 1, 5), (2, 3, 5), (4, 2, 3, 5)])
def test_shapes_are_botorchs_own(outputs: int, shape: tuple[int, ...]) -> None:
    model = model_of(outputs)
    ours = path_model(model, 3)(points(*shape))
    if outputs == 1:  # BoTorch's takes an output dimension for a sample dimension
        stock = deterministic.MatheronPathModel(model, sample_shape=torch.Size([3]))
        assert ours.shape == stock(points(*shape)).shape
    assert ours.shape == (*shape[:-2], 3, shape[-1], outputs)


@pytest.mark.parametrize("outputs", [1, 2])
def test_each_function_at_its_own_points(outputs: int) -> None:
    functions, x = path_model(model_of(outputs), 3), points(2, 3, 5)
    own = functions(x)
    for j in range(3):
        shared = functions(x[:, j : j + 1])
        torch.testing.assert_close(own[:, j], shared[:, j])
        torch.testing.assert_close(functions(x[1, j])[j], own[1, j])


def test_own_points_are_one_list_for_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a batch, each had a copy of the weights of all features: 16 GB for 100 functions at 500 points."""
    functions, shapes = path_model(model_of(2), 3), []
    call = type(functions.paths).__call__
    monkeypatch.setattr(type(functions.paths), "__call__", lambda self, x: shapes.append(x.shape) or call(self, x))
    functions(points(2, 3, 5))
    assert shapes == [(2, 1, 15, points(1).shape[-1])]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("shape", [(2,), (2, 1, 2), (2, 3, 2)])
def test_gradient(outputs: int, shape: tuple[int, ...]) -> None:
    functions = path_model(model_of(outputs), 3)
    assert torch.autograd.gradcheck(functions, points(*shape).requires_grad_())


def test_functions_stay_what_they_were() -> None:
    """Transforms that learn in training do not learn from test points, and later data of the model change nothing."""
    model, x = model_of(1), points(4)
    functions = path_model(model, 2)
    values = functions(x)
    functions.train()
    assert not functions.training
    functions(10 * x)
    model.train()
    model.input_transform(100 * x)
    model.outcome_transform(x[:, :1])
    model.likelihood.noise = 2.0
    torch.testing.assert_close(functions(x), values, rtol=0, atol=0)


def test_thompson_sampling() -> None:
    model, x = model_of(1), points(4, 3)
    functions = path_model(model, 3)
    acquisition = thompson.PathwiseThompsonSampling(model)
    acquisition.samples, acquisition.batch_size = functions, 3
    values = functions(x.unsqueeze(-2)).sum(dim=(-3, -2, -1))
    torch.testing.assert_close(acquisition(x), values)


def test_maxima_of_the_functions() -> None:
    torch.manual_seed(0)  # BoTorch draws its candidates from the global generator
    functions = path_model(model_of(1), 3)
    best, values = search.optimize_posterior_samples(functions, BOUNDS, raw_samples=64, num_restarts=2)
    assert best.shape == (3, 3)
    torch.testing.assert_close(functions(best.unsqueeze(-2)).reshape(3, 1), values)
    assert (values.squeeze(-1) >= functions(points(300)).squeeze(-1).amax(-1) - 1e-6).all()


def test_functions_of_finitely_many_features() -> None:
    x, y = data(30)
    model = models.SingleTaskGP(x, y.unsqueeze(-1), covar_module=gpytorch.kernels.RFFKernel(20, num_dims=3))
    mll = gpi.mlls.VariationalFeatureMarginalLogLikelihood(model.likelihood, model, generator=0)
    functions = mll.posterior().sample_paths(3)
    values = paths.SamplePathModel(model, functions)(x[:5])
    assert values.shape == (3, 5, 1)
    assert torch.equal(values.squeeze(-1), model.outcome_transform.untransform(functions(x[:5]))[0])


def test_what_does_not_fit() -> None:
    x, y = data(12)
    x = (x + 2) / 4  # the unit cube, as BoTorch asks
    functions = path_model(model_of(1), 3)
    with pytest.raises(ValueError, match=r"3 functions.*\[\*b, 3, t, d\], got \(2, 5, 3\)"):
        functions(points(2, 5))
    for model in (
        models.MultiTaskGP(torch.cat([x, (torch.arange(12) % 2).unsqueeze(-1)], dim=-1), y.unsqueeze(-1), -1),
        regression(gpytorch.kernels.RBFKernel()).model,
    ):
        with pytest.raises(TypeError, match=f"SingleTaskGP, got {type(model).__name__}"):
            paths.SamplePathModel(model, functions.paths)
    batch = models.SingleTaskGP(x.expand(2, 12, 3), y.expand(2, 12).unsqueeze(-1))
    with pytest.raises(ValueError, match="a batch of"):
        paths.SamplePathModel(batch, functions.paths)

"""Sample paths are functions, and their distribution is the posterior."""

import copy
import pickle
from typing import Any

import pytest
import torch
from gpytorch import kernels

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_solvers import default as default_solvers
from gpy_iterative.prediction import PathwisePosterior, SamplePaths
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.spectral.features import RandomFourierFeatures
from tests.exact.gaussian_models import CASES, Case, regression
from tests.exact.prediction.test_posterior import dense, held_out_points
from tests.monte_carlo import assert_mean_within

TIGHT = ConjugateGradients(tolerance=1e-10)


def posterior_of(
    case: Case, solver: Cholesky | ConjugateGradients = TIGHT, num_frequencies: int = 50
) -> PathwisePosterior:
    return PathwisePosterior(case.model, case.likelihood, solver=solver, num_frequencies=num_frequencies)


@pytest.mark.parametrize("name", ["matern-3/2", "rational-quadratic", "additive", "batch", "deep", "fixed-noise"])
def test_the_same_functions_at_every_call(name: str) -> None:
    case, x = CASES[name](), held_out_points(7)
    paths = posterior_of(case).sample_paths(5)
    values = paths(x)
    batch = case.y.shape[:-1]
    assert values.shape == (5, *batch, 7)
    torch.testing.assert_close(paths(x), values)
    torch.testing.assert_close(paths(x[[4, 1]]), values[..., [4, 1]])
    if not batch:
        torch.testing.assert_close(paths(x[:6].reshape(2, 1, 3, 3)), values[..., :6].reshape(5, 2, 1, 3))


def test_a_seed_serves_as_a_generator() -> None:
    case, x = CASES["matern-3/2"](), held_out_points(3)
    first, again, other = (
        PathwisePosterior(case.model, case.likelihood, generator=seed).sample_paths(2)(x) for seed in (7, 7, 8)
    )
    torch.testing.assert_close(first, again)
    assert (first - other).abs().max() > 1e-3


def test_neighbouring_seeds_share_no_path() -> None:
    """Path j had the seed `seed + j`: its neighbour's path j - 1, but for the frequencies."""
    case, x = CASES["matern-3/2"](), held_out_points(5)
    first, second = (
        PathwisePosterior(case.model, case.likelihood, generator=seed).sample_paths(400)(x) for seed in (0, 1)
    )
    for shift in (-1, 0, 1):
        correlations = torch.corrcoef(torch.cat([first, second.roll(shift, 0)], dim=1).mT)[:5, 5:].diagonal()
        assert correlations.abs().max() < 4 / 400**0.5


@pytest.mark.slow
def test_the_spread_of_paths_where_a_lengthscale_has_many_data() -> None:
    """The posterior is then made of high frequencies. The kernel's own frequencies spread .79 and 1.07 times as much."""
    generator = torch.Generator().manual_seed(0)
    x = 16 * torch.rand(1000, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, 0] / 6) + 0.1 * torch.randn(1000, generator=generator, dtype=torch.float64)
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)))
    case.model.set_train_data(x, y, strict=False)
    case.likelihood.noise, case.model.covar_module.outputscale = 0.01, 3.6
    case.model.covar_module.base_kernel.lengthscale = 43.7
    points = 16 * torch.rand(100, 2, generator=generator, dtype=torch.float64)
    for seed in (2, 3):
        posterior = PathwisePosterior(case.model, case.likelihood, solver=Cholesky(), generator=seed)
        with torch.no_grad():
            ratio = posterior.sample_paths(250)(points).std(0) / posterior(points).stddev
        assert 0.95 < ratio.mean() < 1.05


@pytest.mark.slow
@pytest.mark.parametrize("solver", [Cholesky(), TIGHT])
def test_distribution(solver: Cholesky | ConjugateGradients) -> None:
    """2,000 paths with features whose own error is known: mean and covariance of pathwise conditioning.

    Given the features, a path's covariance is c (Phi Phi^T) c^T + noise for the contrast c = [1, -k H^-1]: exact for
    any number of frequencies, and the posterior's covariance where they are many.
    """
    case, x = CASES["matern-3/2"](), held_out_points(4)
    posterior = posterior_of(case, solver, num_frequencies=3000)
    mean, covariance = dense(case, x)
    values = posterior.sample_paths(2000)(x)
    assert_mean_within(values, mean, max_sem=0.03)
    deviations = values - mean
    products = deviations.unsqueeze(-1) * deviations.unsqueeze(-2)
    # One set of 3,000 frequencies is off by its own error, the same for all paths.
    assert_mean_within(products, covariance, max_sem=0.016, floor=0.03)


def test_paths_are_as_exact_as_means_where_the_prior_is_far_larger_than_the_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their columns are then far larger: at the tolerance of the targets, paths spread twice as much."""
    monkeypatch.setattr(default_solvers, "EXACT_BELOW", 1000)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1100, 2, generator=generator, dtype=torch.float64)
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=2.5)))
    case.model.set_train_data(x, torch.sin(3 * x.sum(-1)), strict=False)
    case.likelihood.noise, case.model.covar_module.outputscale = 1.0, 1e3
    case.model.covar_module.base_kernel.lengthscale = 3.0
    points = torch.rand(20, 2, generator=generator, dtype=torch.float64)
    options = {"exact_below": 0, "num_frequencies": 200}
    default, exact = (
        PathwisePosterior(case.model, case.likelihood, solver=solver, **options) for solver in (None, Cholesky())
    )
    with torch.no_grad():
        error = default.sample_paths(4)(points) - exact.sample_paths(4)(points)
        assert (error.abs() / exact(points).stddev).max() < 0.3


def test_interpolates_without_noise() -> None:
    """All paths pass through data of hardly any noise: the same features act at training and test points."""
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=2.5)), n=15)
    case.likelihood.initialize(noise=1e-4)
    values = posterior_of(case, Cholesky()).sample_paths(6)(case.x)
    assert (values - case.y).abs().max() < 0.1
    assert values.std(0).max() > 1e-4


def test_more_paths_share_the_first() -> None:
    case, x = CASES["rbf"](), held_out_points()
    posterior = posterior_of(case)
    few, many = posterior.sample_paths(3), posterior.sample_paths(8)
    torch.testing.assert_close(many(x)[:3], few(x))
    torch.testing.assert_close(many(x), posterior_of(case).sample_paths(8)(x))  # in any order
    again = posterior.sample_paths(2)
    torch.testing.assert_close(again(x), few(x)[:2])
    assert (many(x)[3:] - many(x)[:1]).abs().min(0).values.max() > 1e-3


def test_all_paths_share_one_draw_of_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw for each path was most of the cost of many paths: 8,192 frequencies and their weights, all thrown away."""
    counts: list[int] = []
    draw = RandomFourierFeatures.draw

    def counted(*arguments: Any) -> Draws:
        counts.append(1)
        return draw(*arguments)

    monkeypatch.setattr(RandomFourierFeatures, "draw", counted)
    case = CASES["matern-3/2"]()
    posterior = posterior_of(case)
    posterior.sample_paths(4)
    posterior.sample_paths(9)
    assert len(counts) == 1


def test_paths_stay_when_the_model_moves() -> None:
    case, x = CASES["rbf"](), held_out_points()
    posterior = posterior_of(case)
    paths = posterior.sample_paths(4)
    before = paths(x)
    for parameter in case.model.parameters():
        parameter.data += 0.4
    torch.testing.assert_close(paths(x), before)
    mean, _ = dense(case, x)
    moved = posterior.sample_paths(4)(x)
    assert (moved - before).abs().max() > 1e-3
    fresh = PathwisePosterior(case.model, case.likelihood, solver=TIGHT, num_frequencies=50)
    torch.testing.assert_close(moved, fresh.sample_paths(4)(x), rtol=0, atol=1e-6)
    assert (moved.mean(0) - mean).abs().max() < 3


def test_paths_of_other_data_and_of_another_dtype() -> None:
    """Old draws do not fit: new ones are made."""
    case, x = CASES["rbf"](), held_out_points()
    posterior = posterior_of(case, Cholesky())
    posterior.sample_paths(3)
    case.model.set_train_data(case.x[:30], case.y[:30], strict=False)
    assert posterior.sample_paths(3)(x).shape == (3, 6)
    case.model.float()
    assert posterior.sample_paths(3)(x.float()).dtype == torch.float32


def test_differentiable_in_the_inputs() -> None:
    case = CASES["matern-5/2"]()
    paths = posterior_of(case).sample_paths(2)
    x = held_out_points(2).requires_grad_()
    assert torch.autograd.gradcheck(paths, (x,), atol=1e-6)
    assert not paths(x.detach()).requires_grad


def test_copies_and_pickles() -> None:
    case, x = CASES["additive"](), held_out_points()
    paths = posterior_of(case).sample_paths(3)
    for twin in (copy.deepcopy(paths), pickle.loads(pickle.dumps(paths))):
        assert isinstance(twin, SamplePaths)
        torch.testing.assert_close(twin(x), paths(x))


def test_many_points_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = CASES["batch"](), held_out_points(9)
    paths = posterior_of(case).sample_paths(3)
    whole = paths(x)
    monkeypatch.setattr("gpy_iterative.spectral.features.ENTRIES_AT_A_TIME", 2 * paths._features.num_frequencies)
    torch.testing.assert_close(paths(x), whole)
    assert paths(x[:0]).shape == (3, 2, 0)


@pytest.mark.slow
def test_several_tasks_are_functions_of_the_point() -> None:
    """2,000 paths of two tasks; the features' own error, the same for all paths, is the floor."""
    case, x = CASES["multitask"](), held_out_points(4)
    posterior = PathwisePosterior(case.model, case.likelihood, solver=Cholesky(), num_frequencies=3000, generator=0)
    paths = posterior.sample_paths(2000)
    values = paths(x)
    assert values.shape == (2000, 4, 2)
    torch.testing.assert_close(paths(x[2:]), values[:, 2:])
    distribution = posterior(x)
    assert_mean_within(values, distribution.mean, max_sem=0.05, floor=0.02)
    torch.testing.assert_close(values.var(0), distribution.variance, rtol=0.2, atol=0.02)


def test_kernels_without_features_name_the_way_out() -> None:
    case = CASES["product"]()
    with pytest.raises(SpectralDensityMissingError, match="register_spectral_density"):
        posterior_of(case).sample_paths(3)


def test_correlated_noise_names_the_way_out() -> None:
    with pytest.raises(SpectralDensityMissingError, match=r"between the tasks[\s\S]*posterior\(x\).rsample\(\)"):
        posterior_of(CASES["multitask-low-rank-noise"]()).sample_paths(3)


def test_bad_number() -> None:
    with pytest.raises(ValueError, match="num_paths must be at least 1, got 0"):
        posterior_of(CASES["rbf"]()).sample_paths(0)

"""What else there is for spatial fields, with the same kernel: SVGP, KISS-GP, GPBoost's Vecchia, and Cholesky factors.

SVGP and KISS-GP have as long as ours takes. GPBoost, where the extra `rivals` is installed, and the Cholesky factor go on
until their own rules stop them.
"""

import time
from collections.abc import Callable

import gpytorch
import torch

from benchmarks.cases.flights import RivalOptions, best_rival
from benchmarks.cases.optimum import ExactValue
from benchmarks.datasets import Split
from benchmarks.metrics import regression_scores
from benchmarks.models import MaternRegression, matern_kernel
from benchmarks.runner import Outcome
from benchmarks.training import dense_computations, take_step, timed_scores

try:
    import gpboost  # pyright: ignore[reportMissingImports]
except ImportError:  # of the extra `rivals`
    gpboost = None

CHOLESKY = "GPyTorch, Cholesky"
#: Of the Cholesky factor, at the most: its time grows with the third power.
CHOLESKY_ROWS = 4000
#: Neighbours of GPBoost's Vecchia approximation: its own default.
NEIGHBOURS = 20


class GridRegression(MaternRegression):
    """KISS-GP: the kernel interpolated from a grid with about as many nodes as there are rows."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        size = gpytorch.utils.grid.choose_grid_size(split.train_x, 1.0)
        both = torch.cat([split.train_x, split.test_x])
        bounds = list(zip(both.amin(0).tolist(), both.amax(0).tolist(), strict=True))
        kernel = matern_kernel(split.train_x)
        kernel.base_kernel = gpytorch.kernels.GridInterpolationKernel(
            kernel.base_kernel, grid_size=size, num_dims=split.train_x.shape[-1], grid_bounds=bounds
        )
        self.covar_module = kernel


def by_svgp(data: Split, seconds: float) -> Outcome:
    """1,000 inducing points, at the rate that is best on held-out training rows; finding that is not counted."""
    outcome = best_rival(data, RivalOptions(), seconds)
    return outcome | {"status": "", "steps": outcome["batches"]}


def by_kiss_gp(data: Split, seconds: float) -> Outcome:
    """GPyTorch's conjugate gradients at their defaults: Adam at .1 for so long, one step at the least."""
    torch.manual_seed(0)
    start, steps, model = time.perf_counter(), 0, GridRegression(data)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    while not steps or time.perf_counter() - start < seconds:
        take_step(model, mll, optimizer, data)
        steps += 1
    mll.eval()

    def score() -> tuple[float, float]:
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            prediction = model.likelihood(model(data.test_x))
        return regression_scores(prediction.mean, prediction.variance, data.test_y)

    return _tested(start, score, steps, model.likelihood.noise.item())


def by_cholesky(data: Split, seconds: float) -> Outcome:
    """GPyTorch's exact inference in float64, to the optimum by L-BFGS."""
    del seconds
    double = Split(data.name, *(part.double() for part in (data.train_x, data.train_y, data.test_x, data.test_y)))
    start, exact = time.perf_counter(), ExactValue(double)
    found = exact.climb()
    exact.coordinates.write(torch.from_numpy(found.x))
    exact.mll.eval()

    def score() -> tuple[float, float]:
        with torch.no_grad(), dense_computations():
            prediction = exact.model.likelihood(exact.model(double.test_x))
        return regression_scores(prediction.mean, prediction.variance, double.test_y)

    return _tested(start, score, found.nit, exact.model.likelihood.noise.item())


def by_gpboost(data: Split, seconds: float) -> Outcome:
    """GPBoost at its defaults, with a lengthscale for each input."""
    del seconds
    start = time.perf_counter()
    model = gpboost.GPModel(
        gp_coords=data.train_x.double().numpy(),
        cov_function="matern_ard",
        cov_fct_shape=1.5,
        gp_approx="vecchia",
        num_neighbors=NEIGHBOURS,
        likelihood="gaussian",
        num_parallel_threads=torch.get_num_threads(),
    )
    model.fit(y=data.train_y.double().numpy())

    def score() -> tuple[float, float]:
        found = model.predict(gp_coords_pred=data.test_x.double().numpy(), predict_var=True, predict_response=True)
        mean, variance = (torch.from_numpy(found[name]) for name in ("mu", "var"))
        return regression_scores(mean, variance, data.test_y.double())

    noise = float(model.get_cov_pars(format_pandas=False).reshape(-1)[0])
    return _tested(start, score, None, noise)


RIVALS: dict[str, Callable[[Split, float], Outcome]] = {
    "SVGP, 1,000 points": by_svgp,
    "KISS-GP": by_kiss_gp,
    CHOLESKY: by_cholesky,
}
if gpboost is not None:
    RIVALS["GPBoost, Vecchia"] = by_gpboost


def _tested(start: float, score: Callable[[], tuple[float, float]], steps: int | None, noise: float) -> Outcome:
    return timed_scores(start, score) | {"status": "", "steps": steps, "noise": noise}

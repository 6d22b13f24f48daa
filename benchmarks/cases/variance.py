"""Error and cost of predictive variances that no Cholesky factor stands behind, and of what joint predictions give."""

import copy
import math
import time
from collections.abc import Sequence

import gpytorch
import numpy as np
import pandas as pd
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import app, console, finish
from benchmarks.datasets import Split, load, standardise
from benchmarks.models import MaternRegression
from benchmarks.training import take_step
from gpy_iterative.prediction import PathwisePosterior, VarianceError

#: Rank and number of neighbours: the default, and what less of either does.
SETTINGS = ((1024, 128), (512, 128), (512, 32), (128, 128), (128, 32))
#: Two dimensions and small noise: where random Fourier features do badly.
PLANE = "plane"


def variance_error_table(
    cases: Sequence[str] = (PLANE, "elevators", "pol", "kin40k", "protein"),
    settings: Sequence[tuple[int, int]] = SETTINGS,
    *,
    rows: int = 1500,
    num_points: int = 500,
    steps: int = 60,
    dtype: torch.dtype = torch.float32,
) -> pd.DataFrame:
    """Median and largest |log(variance / exact)| of the latent function, one row a case and setting.

    Args:
        cases: data sets, and "plane": uniform points in a square, lengthscale 0.2, noise deviation 0.1.
        settings: pairs of rank and number of neighbours.
        rows: training rows; the exact variance needs their Cholesky factor.
        num_points: test points.
        steps: of Adam on the exact marginal likelihood, from the papers' start (data sets only).
        dtype: of everything but the exact factor.

    Returns:
        Columns case, rows, rank, num_neighbours, median, largest, seconds_setup (the projection, once),
        seconds_variance (num_points variances after it).
    """
    table = []
    for case in cases:
        split, model = _case(case, rows, num_points, dtype, steps)
        test_x = split.test_x[:num_points]
        exact = PathwisePosterior(model, model.likelihood, solver=gpi.solvers.Cholesky())(test_x).variance
        for rank, num_neighbours in settings:
            posterior = PathwisePosterior(
                model,
                model.likelihood,
                solver=gpi.solvers.ConjugateGradients(),
                rank=rank,
                num_neighbours=num_neighbours,
                exact_below=0,
            )
            start = time.perf_counter()
            posterior.solves.projection()
            middle = time.perf_counter()
            variance = posterior(test_x).variance
            end = time.perf_counter()
            error = VarianceError.between(variance, exact)
            table.append(
                {
                    "case": case,
                    "rows": split.train_x.shape[0],
                    "rank": rank,
                    "num_neighbours": num_neighbours,
                    "median": error.median,
                    "largest": error.largest,
                    "seconds_setup": middle - start,
                    "seconds_variance": end - middle,
                }
            )
    return pd.DataFrame(table)


def joint_table(
    cases: Sequence[str] = (PLANE, "elevators", "protein"),
    *,
    rows: int = 3000,
    num_points: int = 1500,
    steps: int = 60,
) -> pd.DataFrame:
    """Samples and joint log density of noisy test targets, in float32, by GPyTorch's defaults and by ours.

    Args:
        num_points: more than 800, beyond which GPyTorch takes Lanczos and conjugate gradients.
        cases, rows, steps: as in `variance_error_table`.

    Returns:
        Columns case, prediction ("GPyTorch"; "GPyTorch, exact": the exact mean and covariance, given to GPyTorch's
        distribution; "gpy_iterative"), least, median and most (variance of samples over variance), log_density (a point),
        exact (log density in float64), seconds (of the posterior, density and samples).
    """
    table = []
    for case in cases:
        split, model = _case(case, rows, num_points, torch.float32, steps)
        x, y = split.test_x[:num_points], split.test_y[:num_points]
        exact = _exact(model, split, x)
        density = torch.distributions.MultivariateNormal(*exact).log_prob(y.double()) / len(y)
        ways = {
            "GPyTorch": lambda model=model, x=x: _noisy(model, x),
            "GPyTorch, exact": lambda exact=exact: MultivariateNormal(*(tensor.float() for tensor in exact)),
            "gpy_iterative": lambda model=model, x=x: _noisy(model, x, installs=True),
        }
        for name, predict in ways.items():
            start = time.perf_counter()
            with torch.no_grad():
                prediction = predict()
                log_density = prediction.log_prob(y) / len(y)
                least, median, most = _part_of_variance(prediction)
            table.append(
                {
                    "case": case,
                    "prediction": name,
                    "least": least,
                    "median": median,
                    "most": most,
                    "log_density": float(log_density),
                    "exact": float(density),
                    "seconds": time.perf_counter() - start,
                }
            )
    return pd.DataFrame(table)


def _noisy(model: MaternRegression, x: Tensor, *, installs: bool = False) -> MultivariateNormal:
    model = copy.deepcopy(model).eval()
    if installs:
        PathwisePosterior(model, model.likelihood).install()
    return model.likelihood(model(x))


@torch.no_grad()
def _exact(model: MaternRegression, split: Split, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of targets at x, by GPyTorch's Cholesky factors in float64."""
    model = copy.deepcopy(model).double()
    model.set_train_data(split.train_x.double(), split.train_y.double(), strict=False)
    with gpytorch.settings.max_cholesky_size(100_000):
        prediction = _noisy(model, x.double())
        return prediction.mean, prediction.covariance_matrix


def _part_of_variance(prediction: MultivariateNormal) -> list[float]:
    """Variance of 300 samples over variance: smallest, median and largest of all points."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # GPyTorch draws from the global generator
        parts = prediction.rsample(torch.Size([300])).var(0) / prediction.variance
    return [float(part) for part in torch.quantile(parts, torch.tensor([0.0, 0.5, 1.0]))]


def _case(case: str, rows: int, num_points: int, dtype: torch.dtype, steps: int) -> tuple[Split, MaternRegression]:
    return _plane(rows, num_points, dtype) if case == PLANE else _fitted(case, rows, dtype, steps)


def _fitted(case: str, rows: int, dtype: torch.dtype, steps: int) -> tuple[Split, MaternRegression]:
    """Hyperparameters from a few steps on the exact marginal likelihood."""
    split = load(case, rows=rows, dtype=dtype)
    model = MaternRegression(split)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=gpi.solvers.Cholesky())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        take_step(model, mll, optimizer, split)
    return split, model


def _plane(rows: int, num_points: int, dtype: torch.dtype) -> tuple[Split, MaternRegression]:
    random = np.random.default_rng(0)
    x = random.uniform(size=(rows + num_points, 2))
    y = np.sin(6 * x.sum(1)) + 0.1 * random.normal(size=len(x))
    split = standardise(PLANE, x[:rows], y[:rows], x[rows:], y[rows:], dtype)
    model = MaternRegression(split)
    # 0.2 in the unit square, whose uniform coordinates have the standard deviation 1 / sqrt(12).
    model.covar_module.base_kernel.lengthscale = 0.2 * math.sqrt(12)
    model.likelihood.noise = 0.01
    return split, model


@app.command()
def variance(rows: int = 1500, num_points: int = 500, steps: int = 60) -> None:
    """The posterior variance's error against the exact one."""
    frame = variance_error_table(rows=rows, num_points=num_points, steps=steps)
    console.print(frame.to_string())
    finish("variance", {"rows": rows, "steps": steps}, torch.get_num_threads(), table=frame.to_dict("records"))


@app.command()
def joint(rows: int = 3000, num_points: int = 1500, steps: int = 60) -> None:
    """Samples and log densities of many points at once, by GPyTorch's posterior and by ours."""
    frame = joint_table(rows=rows, num_points=num_points, steps=steps)
    console.print(frame.to_string())
    options = {"rows": rows, "num_points": num_points, "steps": steps}
    finish("joint", options, torch.get_num_threads(), table=frame.to_dict("records"))

"""Posterior functions from iterative solves and from BoTorch's sampler, and the exact posterior.

A program of its own, `python -m benchmarks.path_samplers`: importing BoTorch changes the settings under which GPyTorch is
measured elsewhere.
"""

import json
import time
from functools import partial
from pathlib import Path

import torch
import typer
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.sampling.pathwise import draw_kernel_feature_paths, draw_matheron_paths
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.datasets import Split, load
from benchmarks.runner import Outcome, contender, run_here
from gpy_iterative.botorch import SamplePathModel

#: Points at which the functions are compared with the exact posterior.
NUM_POINTS = 500
#: Rows of which the hyperparameters are fitted: so few that the fit is exact.
FITTED_ROWS = 1000


def _model(data: Split) -> SingleTaskGP:
    """BoTorch's default: RBF with a lengthscale for each input, priors, standardised outcomes."""
    return SingleTaskGP(data.train_x, data.train_y.unsqueeze(-1))


def _prepared(dataset: str, rows: int, hyperparameters: list[float], dtype: torch.dtype) -> tuple[SingleTaskGP, Tensor]:
    """The model in evaluation mode, and the points of comparison."""
    data = load(dataset, rows=rows, dtype=dtype)
    model = _model(data)
    values = torch.tensor(hyperparameters, dtype=dtype)
    for parameter, part in zip(model.parameters(), values.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.data.copy_(part.view_as(parameter))
    model.eval()
    return model, data.test_x[:NUM_POINTS]


@contender("paths", "hyperparameters")
def hyperparameters(*, dataset: str) -> Outcome:
    """Of a fit to the first rows."""
    model = _model(load(dataset, rows=FITTED_ROWS, dtype=torch.float64))
    fit_gpytorch_mll(gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model))
    return {"values": torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()}


@contender("paths", "exact")
def exact(*, dataset: str, rows: int, hyperparameters: list[float]) -> Outcome:
    """Mean and variance at the points, from a Cholesky factor."""
    model, points = _prepared(dataset, rows, hyperparameters, torch.float64)
    with torch.no_grad():
        kernel = model.covar_module(model.train_inputs[0]).to_dense()
        kernel.diagonal().add_(model.likelihood.noise)
        factor = torch.linalg.cholesky(kernel)
        cross = model.covar_module(model.train_inputs[0], points).to_dense()
        residual = (model.train_targets - model.mean_module(model.train_inputs[0])).unsqueeze(-1)
        mean = model.mean_module(points) + (cross.mT @ torch.cholesky_solve(residual, factor)).squeeze(-1)
        half = torch.linalg.solve_triangular(factor, cross, upper=False)
        variance = model.covar_module(points, diag=True) - half.square().sum(0)
        mean, variance = model.outcome_transform.untransform(mean.unsqueeze(-1), variance.unsqueeze(-1))
    return {"mean": mean.flatten().tolist(), "variance": variance.flatten().tolist()}


def iterative(
    *, dataset: str, rows: int, hyperparameters: list[float], num_paths: int, dtype: torch.dtype = torch.float64
) -> Outcome:
    """`mll.posterior().sample_paths(k)` with its defaults."""
    model, points = _prepared(dataset, rows, hyperparameters, dtype)
    start = time.perf_counter()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)
    paths = SamplePathModel(model, mll.posterior().sample_paths(num_paths))
    drawn = time.perf_counter()
    with torch.no_grad():
        values = paths(points).squeeze(-1)
    return _outcome(start, drawn, values)


def matheron(
    *, dataset: str, rows: int, hyperparameters: list[float], num_paths: int, num_features: int = 1024
) -> Outcome:
    """BoTorch's `draw_matheron_paths`."""
    model, points = _prepared(dataset, rows, hyperparameters, torch.float64)
    torch.manual_seed(0)  # BoTorch draws from the global generator
    start = time.perf_counter()
    with torch.no_grad():
        sampler = partial(draw_kernel_feature_paths, num_features=num_features)
        paths = draw_matheron_paths(model, torch.Size([num_paths]), prior_sampler=sampler)
        drawn = time.perf_counter()
        values = paths(points)
    return _outcome(start, drawn, values)


def _outcome(start: float, drawn: float, values: Tensor) -> Outcome:
    seconds = {"seconds_drawing": drawn - start, "seconds_evaluating": time.perf_counter() - drawn}
    return seconds | {"values": values.tolist()}


METHODS = {
    "ours": iterative,
    "ours, float32": partial(iterative, dtype=torch.float32),
    "botorch": matheron,
    "botorch, 16,384 features": partial(matheron, num_features=16_384),
}
for _name, _method in METHODS.items():
    contender("paths", _name)(_method)


# Plain tracebacks, as in `benchmarks.command_line`: their last line is what is handed on.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(command: str, case: str, name: str, options: str, output: Path) -> None:
    """What `run_apart` starts."""
    assert command == "contender"
    run_here(case, name, json.loads(options), output)


if __name__ == "__main__":
    app()

"""The mini-batch step by itself, at few and at many rows: synthetic data, random Fourier features."""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import gpytorch
import torch
import typer
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import (
    DEFAULT_THREADS,
    Threads,
    app,
    finish,
    run_contenders,
    show,
    succeeded,
    succeeded_or_exit,
)
from benchmarks.devices import peak_process_memory
from benchmarks.runner import Outcome, contender

DIMS = 8
#: Steps before the clock starts.
WARM_UP = 5


class FourierRegression(gpytorch.models.ExactGP):
    """Constant mean, scaled random Fourier features."""

    def __init__(self, x: Tensor, y: Tensor, num_features: int) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        fourier = gpytorch.kernels.RFFKernel(num_samples=num_features // 2, num_dims=x.shape[-1])
        frequencies = torch.randn(x.shape[-1], num_features // 2, generator=torch.Generator().manual_seed(0))
        fourier.randn_weights = frequencies.to(x)
        self.covar_module = gpytorch.kernels.ScaleKernel(fourier)
        self.to(x)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def measure(make: Callable[..., MarginalLogLikelihood], *, n: int, m: int, batch_size: int, steps: int) -> Outcome:
    """Steps as a user writes them, less the user's own call of the model, with GPyTorch's debug mode off."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, DIMS, generator=generator)
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(n, generator=generator)
    model = FourierRegression(x, y, m)
    # One step on few rows, so that what the libraries load at their first use does not count.
    few = FourierRegression(x[:1000], y[:1000], m)
    make(few.likelihood, few, batch_size=batch_size)(few(x[:1000]), y[:1000]).backward()
    before = peak_process_memory()
    mll = make(model.likelihood, model, batch_size=batch_size, generator=0)
    optimizer = torch.optim.Adam(mll.parameters(), lr=1e-3)
    seconds = []
    for _ in range(steps + WARM_UP + 1):
        with gpytorch.settings.debug(False):
            prior = model(x)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = -mll(prior, y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    timed = torch.tensor(seconds[WARM_UP + 1 :], dtype=torch.float64)
    return {
        "seconds": float(timed.median()),
        "least": float(timed.min()),
        "seconds_first": seconds[0],
        "megabytes_beyond": peak_process_memory() - before,
    }


METHODS: dict[str, Callable[..., MarginalLogLikelihood]] = {
    "natural": gpi.mlls.VariationalFeatureMarginalLogLikelihood,
    "gradient": partial(gpi.mlls.VariationalFeatureMarginalLogLikelihood, update="gradient"),
    "scgd": gpi.mlls.CompositionalMarginalLogLikelihood,
    "minimax": gpi.mlls.MinimaxMarginalLogLikelihood,
    "bsgd": gpi.mlls.MinibatchMarginalLogLikelihood,
}
for _name, _make in METHODS.items():
    contender("feature-step", _name)(partial(measure, _make))


@app.command(name="feature-step")
def feature_step(
    n: Annotated[list[int] | None, typer.Option(help="Rows; 10,000 and 1,000,000 by default.")] = None,
    m: int = 256,
    batch_size: int = 256,
    steps: int = 100,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds and memory of a mini-batch step, which do not depend on the number of rows."""
    options = {"m": m, "batch_size": batch_size, "steps": steps}
    sizes = n or [10_000, 1_000_000]
    outcomes = {
        size: run_contenders("feature-step", list(METHODS), threads=threads, n=size, **options) for size in sizes
    }
    reference = succeeded_or_exit(outcomes[sizes[0]])
    show(
        f"m = {m}, b = {batch_size}, {threads} threads, float32 data",
        ["method", "n", "ms / step, median", "least", "over the first n", "first call, s", "MB beyond the data"],
        [
            [
                name,
                str(size),
                f"{1e3 * o['seconds']:.1f}",
                f"{1e3 * o['least']:.1f}",
                f"{o['seconds'] / reference[name]['seconds']:.2f}" if name in reference else "",
                f"{o['seconds_first']:.2f}",
                f"{o['megabytes_beyond']:.0f}",
            ]
            for size, by_name in outcomes.items()
            for name, o in succeeded(by_name).items()
        ],
    )
    finish("feature_step", options, threads, outcomes=outcomes)

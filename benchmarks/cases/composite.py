"""One training step of composite models, ours and GPyTorch's: several outputs, space and time, a grid, features.

The points of space and time are random, or those of stations on nine in ten, most or all days. A panel is of fifty series,
with a covariance between any two.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import gpytorch
import torch
import typer
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.utils.grid import create_data_from_grid
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import (
    DEFAULT_THREADS,
    Threads,
    app,
    finish,
    memory_cell,
    names_of,
    run_contenders,
    show,
    succeeded,
    succeeded_or_exit,
)
from benchmarks.runner import Outcome, contender

OUTPUTS, MANY_OUTPUTS, SERIES, DAYS, INDUCING_POINTS = 2, 10, 50, 120, 200


class SeveralOutputs(gpytorch.models.ExactGP):
    """One kernel of the inputs times a covariance of the tasks (MultitaskKernel)."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        super().__init__(x, y, likelihood)
        num_tasks = y.shape[-1]
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=num_tasks)
        self.covar_module = kernels.MultitaskKernel(
            kernels.MaternKernel(nu=2.5, ard_num_dims=x.shape[-1]), num_tasks=num_tasks, rank=1
        )

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


class IndependentOutputs(gpytorch.models.ExactGP):
    """A kernel for each task."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        super().__init__(x, y, likelihood)
        batch = torch.Size([OUTPUTS])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = kernels.MaternKernel(nu=2.5, ard_num_dims=x.shape[-1], batch_shape=batch)
        self.covar_module = kernels.ScaleKernel(kernel, batch_shape=batch)

    def forward(self, x: Tensor) -> MultivariateNormal:
        each = MultivariateNormal(self.mean_module(x), self.covar_module(x))
        return MultitaskMultivariateNormal.from_batch_mvn(each)


class _OneOutput(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood, kernel: kernels.Kernel) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class TasksOfRows(_OneOutput):
    """One observation of one task in a row, whose number is the last input (IndexKernel)."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        d, num_tasks = x.shape[-1] - 1, int(x[:, -1].max()) + 1
        of_inputs = kernels.MaternKernel(nu=2.5, ard_num_dims=d, active_dims=tuple(range(d)))
        of_tasks = kernels.IndexKernel(num_tasks=num_tasks, rank=1, active_dims=(d,))
        super().__init__(x, y, likelihood, of_inputs * of_tasks)


class SpaceAndTime(_OneOutput):
    """The product of a kernel of two inputs and one of the last."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        space = kernels.MaternKernel(nu=1.5, ard_num_dims=2, active_dims=(0, 1))
        time_kernel = kernels.MaternKernel(nu=2.5, active_dims=(2,))
        super().__init__(x, y, likelihood, kernels.ScaleKernel(space * time_kernel))


class Interpolated(_OneOutput):
    """A kernel of two inputs, interpolated from a grid (KISS-GP)."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        base = kernels.MaternKernel(nu=2.5, ard_num_dims=2)
        grid = kernels.GridInterpolationKernel(base, grid_size=100, num_dims=2, grid_bounds=[(0.0, 1.0)] * 2)
        super().__init__(x, y, likelihood, kernels.ScaleKernel(grid))


class OnGrid(_OneOutput):
    """A kernel of all points of a grid in the plane."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        axes = [column.unique() for column in x.unbind(-1)]
        base = kernels.GridKernel(kernels.RBFKernel(ard_num_dims=2), grid=axes)
        super().__init__(x, y, likelihood, kernels.ScaleKernel(base))


class InducingPoints(_OneOutput):
    """A kernel of few features: of inducing points."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        base = kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, ard_num_dims=x.shape[-1]))
        points = x[: min(INDUCING_POINTS, len(x) // 4)].clone()
        kernel = kernels.InducingPointKernel(base, inducing_points=points, likelihood=likelihood)
        super().__init__(x, y, likelihood, kernel)


class FourierFeatures(_OneOutput):
    """A kernel of 200 random Fourier features."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Likelihood) -> None:
        super().__init__(
            x, y, likelihood, kernels.ScaleKernel(kernels.RFFKernel(num_samples=100, num_dims=x.shape[-1]))
        )


def data(n: int) -> tuple[Tensor, Tensor]:
    """Inputs [n, 3] and targets [n, 2], float32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, generator=generator)
    shared = torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1])
    clean = torch.stack([shared, 0.8 * shared + 0.5 * torch.sin(5 * x[:, 2])], dim=-1)
    return x, clean + 0.1 * torch.randn(n, OUTPUTS, generator=generator)


def many_outputs(n: int) -> tuple[Tensor, Tensor]:
    """Targets [n, 10]."""
    x, y = data(n)
    generator = torch.Generator().manual_seed(1)
    mixed = y @ torch.randn(OUTPUTS, MANY_OUTPUTS, generator=generator)
    return x, mixed + 0.1 * torch.randn(n, MANY_OUTPUTS, generator=generator)


def listed(n: int) -> tuple[Tensor, Tensor]:
    """A row for every target of `data`."""
    x, y = data(n)
    tasks = torch.arange(OUTPUTS).repeat(n).to(x)
    return torch.cat([x.repeat_interleave(OUTPUTS, dim=0), tasks.unsqueeze(-1)], dim=-1), y.flatten()


def panel(n: int, part: float = 1.0) -> tuple[Tensor, Tensor]:
    """About n data of fifty series at this part of their times, in any order."""
    generator = torch.Generator().manual_seed(0)
    num_times = round(n / (part * SERIES))
    cells = torch.randperm(num_times * SERIES, generator=generator)[: round(part * num_times * SERIES)]
    series, at = cells % SERIES, (cells // SERIES) / num_times
    weights = torch.randn(2, SERIES, generator=generator)
    clean = weights[0, series] * torch.sin(20 * at) + 0.5 * weights[1, series] * torch.cos(31 * at)
    x = torch.stack([at, series.to(at)], dim=-1)
    return x, clean + 0.1 * torch.randn(len(x), generator=generator)


def one_output(n: int) -> tuple[Tensor, Tensor]:
    x, y = data(n)
    return x, y[:, 0]


def plane(n: int) -> tuple[Tensor, Tensor]:
    x, y = one_output(n)
    return x[:, :2].contiguous(), y


def image(n: int) -> tuple[Tensor, Tensor]:
    """About n pixels, all of a square, inputs in GPyTorch's order."""
    axis = torch.linspace(0, 1, round(n**0.5))
    x = create_data_from_grid([axis, axis])
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(0))
    return x, torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.1 * noise


def stations_and_days(n: int, part: float = 0.9) -> tuple[Tensor, Tensor]:
    """About n data of stations on this part of the days, in any order."""
    generator = torch.Generator().manual_seed(0)
    stations = torch.rand(max(round(n / (part * DAYS)), 2), 2, generator=generator)
    cells = torch.randperm(len(stations) * DAYS, generator=generator)
    cells = cells[: round(part * len(cells))]
    day = (cells % DAYS) / DAYS
    x = torch.cat([stations[cells // DAYS], day.unsqueeze(-1)], dim=-1)
    clean = torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.5 * torch.sin(5 * x[:, 2])
    return x, clean + 0.1 * torch.randn(len(x), generator=generator)


_OF_ALL_TASKS = partial(MultitaskGaussianLikelihood, num_tasks=OUTPUTS)
#: Model, likelihood and data.
MODELS: dict[str, tuple[type[gpytorch.models.ExactGP], Callable[[], Likelihood], Callable[[int], Any]]] = {
    "MultitaskKernel": (SeveralOutputs, _OF_ALL_TASKS, data),
    "MultitaskKernel, ten outputs": (SeveralOutputs, partial(MultitaskGaussianLikelihood, MANY_OUTPUTS), many_outputs),
    "MultitaskKernel, correlated noise": (SeveralOutputs, partial(_OF_ALL_TASKS, rank=1), data),
    "independent": (IndependentOutputs, _OF_ALL_TASKS, data),
    "IndexKernel": (TasksOfRows, GaussianLikelihood, listed),
    "panel": (TasksOfRows, GaussianLikelihood, panel),
    "panel, most times": (TasksOfRows, GaussianLikelihood, partial(panel, part=0.95)),
    "space and time": (SpaceAndTime, GaussianLikelihood, one_output),
    "GridInterpolationKernel": (Interpolated, GaussianLikelihood, plane),
    "stations and days": (SpaceAndTime, GaussianLikelihood, stations_and_days),
    "stations and most days": (SpaceAndTime, GaussianLikelihood, partial(stations_and_days, part=0.98)),
    "stations and all days": (SpaceAndTime, GaussianLikelihood, partial(stations_and_days, part=1.0)),
    "GridKernel": (OnGrid, GaussianLikelihood, image),
    "InducingPointKernel": (InducingPoints, GaussianLikelihood, one_output),
    "RFFKernel": (FourierFeatures, GaussianLikelihood, one_output),
}
MLLS: dict[str, Callable[..., Any]] = {
    "ours": gpi.mlls.HutchinsonMarginalLogLikelihood,
    "GPyTorch": gpytorch.mlls.ExactMarginalLogLikelihood,
}
NAMES = [f"{ours}, {model}" for model in MODELS for ours in MLLS]


def train(whose: str, kind: str, *, n: int, steps: int) -> Outcome:
    """Adam; one step more than `steps` is taken, and the first left out."""
    torch.manual_seed(0)  # GPyTorch draws the tasks' covariance
    make, make_likelihood, make_data = MODELS[kind]
    likelihood, (x, y) = make_likelihood(), make_data(n)
    model = make(x, y, likelihood).train()
    mll = MLLS[whose](likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seconds, losses = [], []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:], "seconds_median": statistics.median(seconds[1:]), "losses": losses}


for _name in NAMES:
    contender("composite", _name)(partial(train, *_name.split(", ", maxsplit=1)))


@app.command()
def composite(
    n: Annotated[int, typer.Option(help="Points.")] = 5000,
    steps: int = 3,
    only: Annotated[list[str] | None, names_of(NAMES, "Contenders, by name.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds and memory of one training step with several outputs, a product of kernels, a grid, or features."""
    outcomes = run_contenders("composite", only or NAMES, threads=threads, n=n, steps=steps)
    succeeded_or_exit(outcomes)
    show(
        f"{n:,} points, {threads} threads",
        ["contender", "s / step", "MB", "loss after the steps"],
        [
            [name, f"{o['seconds_median']:.2f}", memory_cell(o), f"{o['losses'][-1]:.4f}"]
            for name, o in succeeded(outcomes).items()
        ],
    )
    finish("composite", {"n": n, "steps": steps}, threads, outcomes=outcomes)

"""`gpi.fit` from subsets and predictions with variances, on a field over points in one to three dimensions; and rivals."""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated

import gpytorch
import torch
import typer

from benchmarks.cases.spatial import Layout, points
from benchmarks.cases.spatial_rivals import CHOLESKY, CHOLESKY_ROWS, RIVALS
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenDevice,
    Threads,
    app,
    finish,
    memory_cell,
    names_of,
    run_contenders,
    show,
    succeeded,
)
from benchmarks.datasets import Split
from benchmarks.devices import Device, peak_memory
from benchmarks.runner import Outcome, contender
from benchmarks.training import by_fit, train_and_test
from gpy_iterative.spectral import Draws, spectral_density

CASE, FIT = "spatial_fit", "gpi.fit, from subsets"
#: Cosines that a field is the sum of.
COSINES = 4000


def field(n: int, d: int, *, test_rows: int, lengthscale: float, noise: float, layout: str) -> Split:
    """A draw of a Matern-3/2 process of variance 1 by random cosines, with noise of this variance; float32."""
    generator = torch.Generator().manual_seed(0)
    kernel = gpytorch.kernels.MaternKernel(nu=1.5)
    density = spectral_density(kernel)
    assert density is not None
    normal, uniform = partial(torch.randn, generator=generator), partial(torch.rand, generator=generator)
    draws: Draws = density.draw(kernel, d, COSINES, normal, uniform)
    frequencies = density.frequencies(kernel, draws).detach().reshape(COSINES, d) / lengthscale
    phases = 2 * math.pi * torch.rand(COSINES, generator=generator)
    amplitudes = math.sqrt(2 / COSINES) * torch.randn(COSINES, generator=generator)
    x = points(n + test_rows, d, layout).float()[torch.randperm(n + test_rows, generator=generator)]
    latent = torch.cat([(part @ frequencies.mT + phases).cos() @ amplitudes for part in x.split(5000)])
    y = latent + math.sqrt(noise) * torch.randn(len(x), generator=generator)
    return Split(f"field in {d} dimensions", x[:n], y[:n], x[n:], y[n:])


@contender(CASE, FIT)
def fitted(
    *, n: int, d: int, test_rows: int, lengthscale: float, noise: float, layout: str, device: str = "cpu"
) -> Outcome:
    """The history of the fit, how it ended, and scores on the test rows."""
    data = field(n, d, test_rows=test_rows, lengthscale=lengthscale, noise=noise, layout=layout).to(device)
    outcome, posterior = train_and_test(data, partial(by_fit, start="subsets"))
    return outcome | {"noise": posterior.model.likelihood.noise.item(), **peak_memory()}


def _rival(
    train: Callable[[Split, float], Outcome], *, n: int, d: int, seconds: float, **given: float | str
) -> Outcome:
    return train(field(n, d, **given), seconds)


for _name, _train in RIVALS.items():
    contender(CASE, _name)(partial(_rival, _train))


@app.command()
def spatial_fit(
    n: Annotated[list[int] | None, typer.Option(min=1, help="Rows; 10,000 and 100,000 by default.")] = None,
    d: Annotated[int, typer.Option(min=1, help="Dimensions.")] = 2,
    only: Annotated[
        list[str] | None,
        names_of([FIT, *RIVALS], "Besides gpi.fit, which the others' time comes from; they compute on the CPU."),
    ] = None,
    test_rows: Annotated[int, typer.Option(min=1)] = 10_000,
    lengthscale: Annotated[float, typer.Option(help="The inputs lie in [-2, 2]^d.")] = 0.2,
    noise: Annotated[float, typer.Option(help="Variance; that of the field is 1.")] = 0.01,
    layout: Layout = Layout.UNIFORM,
    device: ChosenDevice = Device.CPU,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds, memory and scores of a whole fit and its predictions on a spatial field, beside rivals."""
    given = {"d": d, "test_rows": test_rows, "lengthscale": lengthscale, "noise": noise, "layout": layout.value}
    outcomes: dict[str, dict[str, Outcome]] = {}
    for size in n or [10_000, 100_000]:
        found = run_contenders(CASE, [FIT], threads=threads, n=size, device=device.value, **given)
        seconds = sum(found[FIT].get(name, 0.0) for name in ("seconds", "seconds_prediction"))
        rivals = [name for name in (RIVALS if only is None else only) if name != FIT]
        rivals = [name for name in rivals if name != CHOLESKY or size <= CHOLESKY_ROWS]
        found |= run_contenders(CASE, rivals, threads=threads, n=size, seconds=seconds, **given)
        outcomes[f"n={size} d={d}"] = found
    show(
        f"d = {d}, {layout.value}, lengthscale {lengthscale:g}, noise variance {noise:g}",
        ["", "", "ended", "steps", "s fit", "s prediction", "MB", "noise", "RMSE", "log-likelihood"],
        [
            [
                size,
                name,
                o["status"],
                "" if o["steps"] is None else str(o["steps"]),
                f"{o['seconds']:.0f}",
                f"{o['seconds_prediction']:.0f}",
                memory_cell(o),
                f"{o['noise']:.4f}",
                f"{o['rmse']:.4f}",
                f"{o['log_likelihood']:.4f}",
            ]
            for size, found in outcomes.items()
            for name, o in succeeded(found).items()
        ],
    )
    finish(f"{CASE}_{d}d", {"n": n, **given}, threads, device=device, outcomes=outcomes)

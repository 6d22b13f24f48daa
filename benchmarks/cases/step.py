"""One training step: ours, GPyTorch's, and the dense one; seconds, memory, epochs, and the gradient's error."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated

import gpytorch
import torch
import typer
from gpytorch.mlls import MarginalLogLikelihood

import gpy_iterative as gpi
from benchmarks.busy_processes import busy_processes
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenData,
    ChosenDevice,
    ChosenSplit,
    FirstRows,
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
from benchmarks.datasets import load
from benchmarks.devices import Device, clock
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender
from benchmarks.training import close_estimates, dense_computations, take_step

#: Steps whose hyperparameters the gradient's error is measured at.
CHECKPOINTS = (0, 5, 10)

MakeMll = Callable[[MaternRegression, int], MarginalLogLikelihood]


def _stock(model: MaternRegression, seed: int) -> MarginalLogLikelihood:
    torch.manual_seed(seed)
    return gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)


def _ours(model: MaternRegression, seed: int) -> MarginalLogLikelihood:
    return gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=seed)


def _ours_tight(model: MaternRegression, seed: int) -> MarginalLogLikelihood:
    solver = gpi.solvers.AlternatingProjections(tolerance=0.01, probe_tolerance=0.01)
    return gpi.mlls.HutchinsonMarginalLogLikelihood(
        model.likelihood, model, num_probes=64, solver=solver, generator=seed
    )


def _ours_ten(model: MaternRegression, seed: int) -> MarginalLogLikelihood:
    return gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, num_probes=10, generator=seed)


def _pathwise(model: MaternRegression, seed: int) -> MarginalLogLikelihood:
    return gpi.mlls.PathwiseMarginalLogLikelihood(model.likelihood, model, generator=seed)


METHODS: dict[str, tuple[MakeMll, Callable[[], AbstractContextManager]]] = {
    "ours": (_ours, nullcontext),
    "ours, 10 probes": (_ours_ten, nullcontext),  # as many as GPyTorch takes by default
    "ours, 64 probes at .01": (_ours_tight, nullcontext),
    "ours, pathwise": (_pathwise, nullcontext),
    "gpytorch": (_stock, nullcontext),
    "gpytorch, 64 probes at .01": (_stock, close_estimates),
    "gpytorch, Cholesky": (_stock, dense_computations),
}


def train(
    method: str, *, dataset: str, split: int, rows: int | None, steps: int, rate: float, device: str = "cpu"
) -> Outcome:
    """Adam from the papers' start. One step more than `steps` is taken: the first is told apart."""
    make, settings = METHODS[method]
    data = load(dataset, split, rows=rows).to(device)
    model = MaternRegression(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    seconds, epochs, losses, checkpoints = [], [], [], []
    with settings():
        mll = make(model, 0)
        for step in range(steps + 1):
            if step in CHECKPOINTS:
                checkpoints.append(model.flat_parameters().tolist())
            start = clock(device)
            losses.append(take_step(model, mll, optimizer, data))
            seconds.append(clock(device) - start)
            if isinstance(mll, gpi.mlls.IterativeMarginalLogLikelihood) and mll.report is not None:
                epochs.append(mll.report.epochs)
    return {
        "rows": len(data.train_y),
        "seconds_first": seconds[0],
        "seconds": seconds[1:],
        "seconds_mean": statistics.mean(seconds[1:]),
        "seconds_median": statistics.median(seconds[1:]),
        "epochs": epochs,
        "losses": losses,
        "checkpoints": checkpoints,
    }


def gradients(
    method: str,
    *,
    dataset: str,
    split: int,
    rows: int | None,
    checkpoints: list[list[float]],
    seeds: int,
    device: str = "cpu",
) -> Outcome:
    """The method's gradient at given hyperparameters, cold, once a seed: [checkpoint][seed][parameter]."""
    make, settings = METHODS[method]
    data = load(dataset, split, rows=rows).to(device)
    found = []
    for values in checkpoints:
        found.append([])
        for seed in range(seeds):
            model = MaternRegression(data)
            model.set_flat_parameters(torch.tensor(values))
            with settings():
                (-make(model, seed)(model(data.train_x), data.train_y)).backward()
            found[-1].append(model.flat_gradient().tolist())
    return {"gradients": found}


def exact_gradients(
    *, dataset: str, split: int, rows: int | None, checkpoints: list[list[float]], device: str = "cpu"
) -> Outcome:
    """The exact gradient in float64, from a Cholesky factor and the dense inverse."""
    data = load(dataset, split, rows=rows, dtype=torch.float64).to(device)
    found = []
    for values in checkpoints:
        model = MaternRegression(data)
        model.set_flat_parameters(torch.tensor(values, dtype=torch.float64))
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=gpi.solvers.Cholesky())
        (-mll(model(data.train_x), data.train_y)).backward()
        found.append(model.flat_gradient().tolist())
    return {"gradients": found}


def relative_errors(estimates: list[list[list[float]]], exact: list[list[float]]) -> list[float]:
    """|estimate - exact| / |exact| at every checkpoint: the root mean square over seeds."""
    errors = []
    for samples, truth in zip(estimates, exact, strict=True):
        target = torch.tensor(truth, dtype=torch.float64)
        difference = torch.tensor(samples, dtype=torch.float64) - target
        errors.append(float(difference.square().sum(-1).mean().sqrt() / target.norm()))
    return errors


for _method in METHODS:
    contender("step", _method)(partial(train, _method))
    contender("gradients", _method)(partial(gradients, _method))
contender("gradients", "exact")(exact_gradients)


@app.command()
def step(
    dataset: ChosenData = "elevators",
    split: ChosenSplit = 0,
    rows: FirstRows = None,
    steps: int = 10,
    only: Annotated[list[str] | None, names_of(METHODS, "Contenders, by name; all but Cholesky by default.")] = None,
    gradient_error: Annotated[bool, typer.Option(help="Measure gradients against the exact one.")] = True,
    seeds: Annotated[int, typer.Option(help="Gradients a contender and checkpoint.")] = 2,
    beside: Annotated[int, typer.Option(min=0, help="Busy processes that run at the same time.")] = 0,
    device: ChosenDevice = Device.CPU,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds, memory, epochs and gradient error of one training step."""
    names = only or [name for name in METHODS if "Cholesky" not in name]
    options = {"dataset": dataset, "split": split, "rows": rows, "device": device}
    with busy_processes(beside):
        outcomes = run_contenders("step", names, threads=threads, steps=steps, rate=0.1, **options)
    good = succeeded_or_exit(outcomes)
    errors: dict[str, list[float]] = {}
    if gradient_error:
        given = {"threads": threads, "checkpoints": next(iter(good.values()))["checkpoints"], **options}
        exact = succeeded_or_exit(run_contenders("gradients", ["exact"], **given))["exact"]["gradients"]
        found = run_contenders("gradients", names, seeds=seeds, **given)
        errors = {name: relative_errors(outcome["gradients"], exact) for name, outcome in succeeded(found).items()}
    company = f", beside {beside} busy processes" if beside else ""
    show(
        f"{dataset}, steps 1 to {steps}, {device}, {threads} threads{company}",
        ["contender", "s / step", "median", "first", "MB", "epochs / step", "gradient errors at steps 0, 5, 10"],
        [
            [
                name,
                f"{o['seconds_mean']:.2f}",
                f"{o['seconds_median']:.2f}",
                f"{o['seconds_first']:.2f}",
                memory_cell(o),
                f"{sum(o['epochs'][1:]) / steps:.1f}" if o["epochs"] else "",
                " ".join(f"{error:.3f}" for error in errors.get(name, [])),
            ]
            for name, o in good.items()
        ],
    )
    content = {"outcomes": outcomes, "gradient_errors": errors}
    name = f"step_{dataset}" + (f"_beside_{beside}" if beside else "")
    finish(name, options | {"steps": steps, "beside": beside}, threads, device=device, **content)

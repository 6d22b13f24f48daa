"""Fits of BoTorch's surrogate models: its default L-BFGS, and average information, at sizes of Bayesian optimisation."""

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import gpytorch
import torch
import typer
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import MixedSingleTaskGP, MultiTaskGP, SingleTaskGP
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.test_functions import Ackley, Branin, Hartmann, Levy, Rosenbrock, SyntheticTestFunction
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, finish, run_contenders, show, succeeded
from benchmarks.runner import Outcome, contender
from gpy_iterative.botorch import fit_average_information

LBFGS, AVERAGE_INFORMATION = "L-BFGS", "average information"
OPTIMIZERS = {
    LBFGS: (gpytorch.mlls.ExactMarginalLogLikelihood, fit_gpytorch_mll_scipy),
    AVERAGE_INFORMATION: (gpi.mlls.HutchinsonMarginalLogLikelihood, fit_average_information),
}
#: Standard deviation of the noise, relative to that of the function's values.
NOISE = 0.05
SEEDS = 2


def functions() -> list[SyntheticTestFunction]:
    return [Branin(), Hartmann(dim=6), Levy(dim=10), Ackley(dim=20), Rosenbrock(dim=8)]


def observed(function: SyntheticTestFunction, num_data: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the unit cube [num_data, d], for the function's box, and noisy values [num_data, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_data, function.dim, generator=generator, dtype=torch.float64)
    assert isinstance(function.bounds, Tensor)
    low, high = function.bounds.double()
    values = function(low + (high - low) * x).unsqueeze(-1)
    return x, values + NOISE * values.std() * torch.randn(num_data, 1, generator=generator, dtype=torch.float64)


def multitask(x: Tensor, y: Tensor) -> MultiTaskGP:
    """Half of the data of another task: the function plus a trend."""
    task = (torch.arange(len(x)) % 2).to(x).unsqueeze(-1)
    return MultiTaskGP(torch.cat([x, task], -1), y + 0.3 * y.std() * task * x[:, :1], task_feature=-1)


def mixed(x: Tensor, y: Tensor) -> MixedSingleTaskGP:
    """The first input rounded to two categories."""
    category = x[:, :1].round()
    return MixedSingleTaskGP(torch.cat([category, x[:, 1:]], -1), y, cat_dims=[0])


MODELS: dict[str, Callable[[Tensor, Tensor], gpytorch.models.ExactGP]] = {
    "SingleTaskGP": SingleTaskGP,
    "MultiTaskGP": multitask,
    "MixedSingleTaskGP": mixed,
}


def fitted(*, optimizer: str, model: str, rows: int) -> Outcome:
    """Of each fit: seconds, the exact value with priors at the end in total nats, and what L-BFGS gains from there."""
    mll_class, fit = OPTIMIZERS[optimizer]
    fits = []
    for function in functions():
        for seed in range(SEEDS):
            surrogate = MODELS[model](*observed(function, rows, seed))
            torch.manual_seed(seed)  # BoTorch draws new initial values after a fit that failed
            start = time.perf_counter()
            with quiet():
                fit_gpytorch_mll(mll_class(surrogate.likelihood, surrogate), optimizer=fit)
            seconds, value = time.perf_counter() - start, exact_value(surrogate)
            go_on(surrogate)
            left = exact_value(surrogate) - value
            fits.append({"function": type(function).__name__, "seconds": seconds, "value": value, "left": left})
    return {"fits": fits}


def go_on(model: gpytorch.models.ExactGP) -> None:
    """L-BFGS from where the model is; where that fails, the model stays there."""
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    before = copy.deepcopy(mll.state_dict())
    with quiet():
        try:
            fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_scipy, max_attempts=1)
        except ModelFittingError:
            mll.load_state_dict(before)


@contextmanager
def quiet() -> Iterator[None]:
    """BoTorch tells each line search that ended early."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def exact_value(model: gpytorch.models.ExactGP) -> float:
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    inputs, targets = model.train_inputs, model.train_targets
    with gpytorch.settings.max_cholesky_size(len(targets) + 1):
        return mll(model(*inputs), targets, *inputs).item() * len(targets)


@contender("surrogates", LBFGS)
def by_lbfgs(*, model: str, rows: int) -> Outcome:
    return fitted(optimizer=LBFGS, model=model, rows=rows)


@contender("surrogates", AVERAGE_INFORMATION)
def by_average_information(*, model: str, rows: int) -> Outcome:
    return fitted(optimizer=AVERAGE_INFORMATION, model=model, rows=rows)


@app.command()
def surrogates(
    rows: Annotated[list[int] | None, typer.Option(min=2, help="Observations; once for each size.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds and value of fits of BoTorch's models to a few hundred observations, by L-BFGS and by average information."""
    sizes = rows or [50, 200]
    outcomes = {
        f"{model}, {size}": succeeded(
            run_contenders("surrogates", list(OPTIMIZERS), threads=threads, model=model, rows=size)
        )
        for model in MODELS
        for size in sizes
    }
    show(
        "Ten fits each: seconds together; nats of average information above L-BFGS; left: what L-BFGS gains from there",
        ["", LBFGS, AVERAGE_INFORMATION, "times faster", "least", "median", "most", "left (median)", "left (most)"],
        [
            [name, *_compared(*(by_optimizer[optimizer]["fits"] for optimizer in OPTIMIZERS))]
            for name, by_optimizer in outcomes.items()
            if len(by_optimizer) == len(OPTIMIZERS)
        ],
    )
    finish("surrogates", {"rows": sizes}, threads, outcomes=outcomes)


def _compared(theirs: list[dict[str, float]], ours: list[dict[str, float]]) -> list[str]:
    pairs = list(zip(theirs, ours, strict=True))
    seconds = [sum(fit["seconds"] for fit in fits) for fits in (theirs, ours)]
    faster = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    gains, left = sorted(b["value"] - a["value"] for a, b in pairs), sorted(fit["left"] for fit in ours)
    nats = [f"{gain:+.2f}" for gain in (gains[0], statistics.median(gains), gains[-1])]
    return [
        *(f"{total:.1f}" for total in seconds),
        f"{faster:.1f}",
        *nats,
        f"{statistics.median(left):.2f}",
        f"{left[-1]:.2f}",
    ]

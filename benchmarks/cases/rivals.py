"""The same model on the same data for the same time: ours, GPyTorch's exact inference three ways, and SVGP.

Ours trains for so many steps, and each rival for as many seconds as that took (one step at the least). Every one is used
as its documentation shows it: GPyTorch's conjugate gradients with their defaults, Cholesky with fast computations off,
KeOps by its kernels, SVGP with mini-batches and a rate that falls to a tenth.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.datasets import Split, load
from benchmarks.metrics import regression_scores
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from benchmarks.training import close_estimates, dense_computations, take_step, timed_scores
from benchmarks.variational import VariationalGP, VariationalTraining, random_rows

CASE = "rivals"
#: In equal time it takes still fewer steps than GPyTorch's defaults: for comparisons of equal quality.
CLOSE = "GPyTorch, 64 probes at .01"
INDUCING_POINTS = 512
Predict = Callable[[Tensor], MultivariateNormal]
MakeMll = Callable[[MaternRegression], MarginalLogLikelihood]


def _stock(model: MaternRegression) -> MarginalLogLikelihood:
    return gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)


def _hutchinson(model: MaternRegression) -> MarginalLogLikelihood:
    return gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)


def _pathwise(model: MaternRegression) -> MarginalLogLikelihood:
    return gpi.mlls.PathwiseMarginalLogLikelihood(model.likelihood, model, generator=0)


@dataclass(frozen=True)
class Exact:
    """A likelihood, GPyTorch's settings for all of it and those for its predictions, and the kernel."""

    make: MakeMll
    settings: Callable[[], AbstractContextManager] = nullcontext
    predicting: Callable[[], AbstractContextManager] = gpytorch.settings.fast_pred_var
    kernel: type[gpytorch.kernels.Kernel] = gpytorch.kernels.MaternKernel


#: Those of GPyTorch have the time of the first.
EXACT = {
    "ours": Exact(_hutchinson),
    "ours, pathwise": Exact(_pathwise),
    "GPyTorch, CG": Exact(_stock),
    # `fast_pred_var` would cost it .03 of log-likelihood on elevators, and CG for every test row takes longer yet.
    CLOSE: Exact(_stock, close_estimates, predicting=dense_computations),
    "GPyTorch, Cholesky": Exact(_stock, dense_computations),
    "GPyTorch, KeOps": Exact(_stock, kernel=gpytorch.kernels.keops.MaternKernel),
}
NAMES = (*(name for name in EXACT if name != CLOSE), "SVGP")


def train_exact(
    name: str,
    *,
    dataset: str,
    split: int,
    rows: int | None,
    steps: int,
    seconds: float | None = None,
    prepare: Callable[[MaternRegression], None] | None = None,
    every: int | None = None,
) -> Outcome:
    """Adam at 0.1 from all hyperparameters at 1, for so many steps or seconds, whichever ends first.

    What prepares the model for it counts as training. The way there, [step, seconds, parameters] `every` so many
    steps, is part of the outcome where that is given.
    """
    exact = EXACT[name]
    torch.manual_seed(0)  # GPyTorch's probes
    data = load(dataset, split, rows=rows)
    model = MaternRegression(data, kernel=exact.kernel)
    way: list[tuple[int, float, list[float]]] = []
    taken, start, spent = 0, time.perf_counter(), 0.0
    if prepare is not None:
        prepare(model)
    mll = exact.make(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with exact.settings():
        while taken < steps and (seconds is None or spent < seconds):
            take_step(model, mll, optimizer, data)
            taken, spent = taken + 1, time.perf_counter() - start
            if every is not None and taken % every == 0:
                way.append((taken, spent, model.flat_parameters().tolist()))
        posterior = mll.posterior() if isinstance(mll, gpi.mlls.IterativeMarginalLogLikelihood) else model.eval()

        def predict(x: Tensor) -> MultivariateNormal:
            with torch.no_grad(), exact.predicting():
                return model.likelihood.eval()(posterior(x))

        outcome = {"steps_taken": taken, **_tested(start, predict, data), "seconds": spent}
        return outcome if every is None else outcome | {"way": way}


def train_svgp(*, dataset: str, split: int, rows: int | None, steps: int, seconds: float) -> Outcome:
    """The same kernel on 512 learned inducing points; `steps` are the others'."""
    data = load(dataset, split, rows=rows)
    torch.manual_seed(0)  # GPyTorch starts its variational mean at random
    start = MaternRegression(data)
    inducing = random_rows(data.train_x, INDUCING_POINTS)
    model = VariationalGP(inducing, start.mean_module, start.covar_module)
    training = VariationalTraining(model, start.likelihood, data.train_x, data.train_y)
    begin = time.perf_counter()
    taken = training.train_for(seconds)
    return {"steps_taken": taken, **_tested(begin, training.predict, data)}


def _tested(start: float, predict: Predict, data: Split) -> Outcome:
    @torch.no_grad()
    def score() -> tuple[float, float]:
        prediction = predict(data.test_x)
        return regression_scores(prediction.mean, prediction.variance, data.test_y)

    return {"train_rows": len(data.train_y), **timed_scores(start, score)}


for _name in EXACT:
    contender(CASE, _name)(partial(train_exact, _name))
contender(CASE, "SVGP")(train_svgp)

#: Data sets, rows and steps of ours in the presets.
SIZES: dict[Preset, tuple[list[str], int | None, int]] = {
    Preset.SMOKE: (["wine"], 300, 2),
    Preset.QUICK: (["elevators"], 6000, 50),
    Preset.PAPER: (["elevators", "pol", "bike"], None, 100),
}


def preset_runs(preset: Preset) -> list[Run]:
    """Everyone on every data set; SVGP takes what steps its time allows, the exact ones no more than ours.

    QUICK leaves our pathwise probes, which have a time of their own, to the case `pathwise`.
    """
    names = [name for name in NAMES if preset is not Preset.QUICK or name != "ours, pathwise"]
    datasets, rows, steps = SIZES[preset]
    runs = []
    for dataset in datasets:
        options = {"dataset": dataset, "split": 0, "rows": rows, "steps": steps}
        ours = Run(CASE, "ours", options)
        runs += [Run(CASE, name, options, None if name.startswith("ours") else ours) for name in names]
    return runs


def tables(found: Sequence[Measured]) -> list[Table]:
    """One of all data sets."""
    rows = [
        [
            measured.run.options["dataset"],
            measured.run.contender,
            f"{measured.outcome['train_rows']:,}",
            str(measured.outcome["steps_taken"]),
            f"{measured.outcome['seconds']:.0f}",
            f"{measured.outcome['seconds_prediction']:.1f}",
            f"{measured.outcome['peak_memory_mb']:,.0f}",
            f"{measured.outcome['rmse']:.4f}",
            f"{measured.outcome['log_likelihood']:.3f}",
        ]
        for measured in found
    ]
    columns = ["data", "", "rows", "steps", "s training", "s prediction", "MB", "RMSE", "log-likelihood"]
    return [Table("Equal time: that of the first row of each data set", columns, rows)]


register(
    Case(CASE, "The same model, data and time for GPyTorch's exact inference, KeOps and SVGP.", preset_runs, tables)
)

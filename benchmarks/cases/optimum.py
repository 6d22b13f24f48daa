"""Where `gpi.fit` ends, against the optimum of the exact log marginal likelihood by L-BFGS in float64."""

import time
from functools import partial
from typing import Literal

import gpytorch
import numpy as np
import torch
from scipy.optimize import OptimizeResult, minimize

import gpy_iterative as gpi
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenSplit,
    SeveralData,
    Threads,
    app,
    finish,
    run_contenders,
    show,
    succeeded_or_exit,
)
from benchmarks.datasets import Split, load
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender
from gpy_iterative.fitting.coordinates import Coordinates

EXACT, FROM_ONES, FROM_SUBSETS, BY_PROBES = "L-BFGS", "fit from ones", "fit from subsets", "fit from ones, probes"
CONTENDERS = [EXACT, FROM_ONES, FROM_SUBSETS, BY_PROBES]
DATASETS = ["elevators", "pol", "protein", "kin40k", "bike"]
#: Iterations of L-BFGS at the most; it ends before.
ITERATIONS = 2000


class ExactValue:
    """The log marginal likelihood in total nats and its gradient by GPyTorch's Cholesky factor, in log coordinates."""

    def __init__(self, data: Split) -> None:
        self.model = MaternRegression(data)
        self.mll = gpytorch.mlls.ExactMarginalLogLikelihood(self.model.likelihood, self.model)
        self.coordinates = Coordinates(self.mll)
        self._data = data

    def __call__(self, position: np.ndarray) -> tuple[float, np.ndarray]:
        self.coordinates.write(torch.from_numpy(position))
        data = self._data
        with gpytorch.settings.max_cholesky_size(len(data.train_x) + 1):
            total = self.mll(self.model(data.train_x), data.train_y) * len(data.train_x)
            return total.item(), self.coordinates.gradient(total).numpy()

    def climb(self) -> OptimizeResult:
        """L-BFGS from where the model is, to its end; the model stays at the last value that was asked for."""
        bounds = list(zip(self.coordinates.lower.tolist(), self.coordinates.upper.tolist(), strict=True))
        return minimize(
            lambda position: tuple(-part for part in self(position)),
            self.coordinates.read().numpy(),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": ITERATIONS, "maxfun": 2 * ITERATIONS, "ftol": 1e-9, "gtol": 1e-3},
        )


@contender("optimum", EXACT)
def climb(*, dataset: str, split: int, rows: int) -> Outcome:
    """The exact value at the end, in total nats."""
    exact = ExactValue(load(dataset, split, rows=rows, dtype=torch.float64))
    start = time.perf_counter()
    found = exact.climb()
    return {
        "status": found.message,
        "steps": found.nit,
        "seconds": time.perf_counter() - start,
        "value": -found.fun,
        "noise": exact.model.likelihood.noise.item(),
    }


def fitted(
    *,
    dataset: str,
    split: int,
    rows: int,
    start: Literal["current", "subsets"] = "current",
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    """How a fit ended, and the exact value there, in total nats; in float32 with the solver that larger data take."""
    solver = gpi.solvers.ConjugateGradients() if dtype == torch.float32 else None
    model = MaternRegression(load(dataset, split, rows=rows, dtype=dtype))
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver, generator=0)
    found = gpi.fit(mll, start=start, progress=False)
    exact = ExactValue(load(dataset, split, rows=rows, dtype=torch.float64))
    value, _ = exact(Coordinates(mll).read().numpy())
    return {
        "status": found.status.name,
        "steps": found.steps,
        "seconds": found.seconds,
        "value": value,
        "noise": model.likelihood.noise.item(),
        "left_to_gain": [row.left_to_gain for row in found.history],
    }


contender("optimum", FROM_ONES)(fitted)
contender("optimum", FROM_SUBSETS)(partial(fitted, start="subsets"))
contender("optimum", BY_PROBES)(partial(fitted, dtype=torch.float32))


@app.command()
def optimum(
    datasets: SeveralData = DATASETS,
    split: ChosenSplit = 0,
    rows: int = 2000,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """How many nats a fit leaves below the exact optimum, and in how many steps, on rows where Cholesky can say it."""
    options = {"split": split, "rows": rows}
    outcomes = {
        dataset: succeeded_or_exit(run_contenders("optimum", CONTENDERS, threads=threads, dataset=dataset, **options))
        for dataset in datasets
    }
    show(
        f"{rows} rows: total nats below the optimum of L-BFGS",
        ["", "", "ended", "steps", "seconds", "nats below", "noise variance"],
        [
            [
                dataset,
                name,
                outcome["status"],
                str(outcome["steps"]),
                f"{outcome['seconds']:.1f}",
                f"{by_name[EXACT]['value'] - outcome['value']:.3f}",
                f"{outcome['noise']:.2e}",
            ]
            for dataset, by_name in outcomes.items()
            for name, outcome in by_name.items()
        ],
    )
    finish("optimum", options, threads, outcomes=outcomes)

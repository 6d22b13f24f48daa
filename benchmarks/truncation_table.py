"""Russian roulette, truncated conjugate gradients and Cholesky by the protocol of Potapczynski et al. 2021, table 1."""

import json
import time
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.mlls import MarginalLogLikelihood

import gpy_iterative as gpi
from benchmarks.datasets import load_random_split, rows_of
from benchmarks.models import SquaredExponentialRegression
from benchmarks.quality import scores
from benchmarks.runner import RESULTS, Outcome, contender
from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.truncation import ExponentialTruncation

#: Data set -> method -> published RMSE and NLL (means over three splits).
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "pol": {"cholesky": (0.112, -0.464), "cg": (0.119, -0.354), "rr-cg": (0.112, -0.458)},
    "elevators": {"cholesky": (0.360, 0.425), "cg": (0.360, 0.429), "rr-cg": (0.360, 0.425)},
    "bike": {"cholesky": (0.035, -0.984), "cg": (0.040, -0.971), "rr-cg": (0.035, -0.982)},
    "kin40k": {"cg": (0.093, 0.468), "rr-cg": (0.091, 0.449)},
    "protein": {"cg": (0.541, 0.934), "rr-cg": (0.541, 0.934)},
    "keggdirected": {"cg": (0.195, 0.415), "rr-cg": (0.087, -0.884)},
}
#: Adam iterations of the paper.
STEPS = {"pol": 1500, "elevators": 1500, "bike": 1500, "kin40k": 800, "protein": 800, "keggdirected": 800}
METHODS = ("rr-cg", "cg", "cholesky")
#: When the learning rate drops to a tenth.
DROPS = (0.5, 0.7, 0.9)
#: Rows up to which a dense factor is tried.
CHOLESKY_ROWS = 12_000


def _mll(method: str, model: SquaredExponentialRegression, seed: int) -> MarginalLogLikelihood:
    likelihood, paper = model.likelihood, PivotedCholesky(rank=5)
    if method == "rr-cg":
        return gpi.mlls.RussianRouletteMarginalLogLikelihood(
            likelihood,
            model,
            truncation=ExponentialTruncation(min_steps=80, rate=0.05),
            num_truncations=2,
            preconditioner=paper,
            generator=seed,
        )
    if method == "cg":
        return gpi.mlls.TruncatedCGMarginalLogLikelihood(
            likelihood, model, num_steps=100, preconditioner=paper, generator=seed
        )
    return gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=gpi.solvers.Cholesky(), generator=seed)


def _train_and_predict(method: str, *, dataset: str, seed: int, rows: int | None, steps: int, rate: float) -> Outcome:
    data = load_random_split(dataset, seed, rows=rows)
    model = SquaredExponentialRegression(data.train_x, data.train_y, ard=True, constant=True)
    mll = _mll(method, model, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [round(drop * steps) for drop in DROPS], 0.1)
    start, values = time.perf_counter(), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(model(data.train_x), data.train_y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        values.append(-float(loss.detach()))
    trained = time.perf_counter()
    with torch.no_grad():
        posterior = gpi.prediction.PathwisePosterior(
            model, model.likelihood, solver=gpi.solvers.ConjugateGradients(tolerance=1e-4)
        )
        prediction = model.likelihood(posterior(data.test_x))
        rmse, log_likelihood = scores(prediction.mean, prediction.variance, data.test_y)
    return {
        "rmse": rmse,
        "nll": -log_likelihood,
        "train_rows": len(data.train_y),
        "test_rows": len(data.test_y),
        "seconds_training": trained - start,
        "seconds_prediction": time.perf_counter() - trained,
        "noise": float(model.likelihood.noise.detach()),
        "outputscale": float(model.covar_module.outputscale.detach()),
        "lengthscales": model.covar_module.base_kernel.lengthscale.detach().reshape(-1).tolist(),
        "values": values,
        "torch": torch.__version__,
        "gpytorch": gpytorch.__version__,
    }


@contender("truncation-table", "rr-cg")
def rr_cg(**options: Any) -> Outcome:
    """80 steps and a random rest, 100 expected."""
    return _train_and_predict("rr-cg", **options)


@contender("truncation-table", "cg")
def cg(**options: Any) -> Outcome:
    """100 steps."""
    return _train_and_predict("cg", **options)


@contender("truncation-table", "cholesky")
def cholesky(**options: Any) -> Outcome:
    """Exact."""
    return _train_and_predict("cholesky", **options)


def training_rows(dataset: str, rows: int | None) -> int:
    """How many rows a run trains on."""
    available = round(0.64 * len(rows_of(dataset)))
    return available if rows is None else min(rows, available)


class Progress:
    """Finished runs in benchmarks/results, so that an interrupted table goes on where it stopped."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = RESULTS / "truncation_table.json" if path is None else path
        self.runs: dict[str, Outcome] = json.loads(self.path.read_text())["runs"] if self.path.exists() else {}

    @staticmethod
    def key(method: str, options: dict[str, Any]) -> str:
        """Everything that changes a run's numbers."""
        return " ".join([method, *(f"{name}={options[name]}" for name in sorted(options))])

    def record(self, key: str, outcome: Outcome, environment: dict[str, Any]) -> None:
        """Keeps one run, in memory and on disk."""
        self.runs[key] = outcome | {"environment": environment}
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps({"runs": self.runs}, indent=1) + "\n")

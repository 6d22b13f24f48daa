"""Russian roulette, truncated conjugate gradients and Cholesky by the protocol of Potapczynski et al. 2021, table 1."""

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import gpytorch
import torch
import typer
from gpytorch.mlls import MarginalLogLikelihood

import gpy_iterative as gpi
from benchmarks import published
from benchmarks.checkpoints import OUT, Checkpoint
from benchmarks.command_line import DEFAULT_MINUTES, DEFAULT_THREADS, FirstRows, Minutes, Threads, app, run_and_show
from benchmarks.datasets import load_random_split, num_rows
from benchmarks.metrics import prediction_scores
from benchmarks.models import SquaredExponentialRegression
from benchmarks.runner import RESULTS, Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table, beside
from benchmarks.training import posterior_scores, take_step
from benchmarks.variational import VariationalGP, VariationalTraining, random_rows
from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.truncation import ExponentialTruncation

CASE = "truncation-table"
CHECKPOINTS = OUT / "truncation_table"
#: Adam iterations of the paper.
STEPS = {"pol": 1500, "elevators": 1500, "bike": 1500, "kin40k": 800, "protein": 800, "keggdirected": 800}
METHODS = ("rr-cg", "cg", "cholesky", "rff", "ss-rff", "svgp")
#: What the command trains by default.
CHOSEN = ("rr-cg", "cg", "cholesky")
#: Frequencies of random features, a thousand features as in the paper, and those a single sample has at the least.
FREQUENCIES, LEAST_FREQUENCIES, FREQUENCY_STEP = 500, 200, 20
INDUCING_POINTS = 512
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
    if method == "rff":
        return gpi.mlls.RFFMarginalLogLikelihood(likelihood, model, num_frequencies=FREQUENCIES, generator=seed)
    if method == "ss-rff":
        return gpi.mlls.SingleSampleRFFMarginalLogLikelihood(
            likelihood,
            model,
            min_frequencies=LEAST_FREQUENCIES,
            frequency_step=FREQUENCY_STEP,
            probabilities="adaptive",
            generator=seed,
        )
    return gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, solver=gpi.solvers.Cholesky(), generator=seed)


def _train_and_predict(
    method: str, *, dataset: str, seed: int, rows: int | None, steps: int, rate: float, minutes: float = math.inf
) -> Outcome:
    """Trains from the last checkpoint on, to the end or for so many minutes, a step at the least; and predicts."""
    start = time.perf_counter()
    data = load_random_split(dataset, seed, rows=rows)
    model = SquaredExponentialRegression(data.train_x, data.train_y, ard=True, constant=True)
    mll = _mll(method, model, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [round(drop * steps) for drop in DROPS], 0.1)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint = Checkpoint(CHECKPOINTS / f"{method}_{dataset}_seed={seed}_rows={rows}_steps={steps}_rate={rate}.pt")
    values: list[float] = []
    earlier = 0.0
    if saved := checkpoint.load():
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        mll.load_training_state(saved["mll"])
        values, earlier = saved["values"], saved["seconds"]
    began = time.perf_counter()
    while len(values) < steps:
        values.append(-take_step(model, mll, optimizer, data))
        scheduler.step()
        if time.perf_counter() - start >= 60 * minutes:
            break
    trained = time.perf_counter()
    seconds = earlier + trained - began
    if len(values) < steps:
        state = {name: part.state_dict() for name, part in parts.items()}
        checkpoint.save(state | {"mll": mll.training_state(), "values": values, "seconds": seconds})
    posterior = gpi.prediction.PathwisePosterior(
        model, model.likelihood, solver=gpi.solvers.ConjugateGradients(tolerance=1e-4)
    )
    rmse, log_likelihood = posterior_scores(model, posterior, data)
    if len(values) == steps:
        checkpoint.remove()
    return {
        "finished": len(values) == steps,
        "rmse": rmse,
        "nll": -log_likelihood,
        "train_rows": len(data.train_y),
        "test_rows": len(data.test_y),
        "steps_taken": len(values),
        "seconds": seconds,
        "seconds_training": seconds,
        "seconds_prediction": time.perf_counter() - trained,
        "noise": float(model.likelihood.noise.detach()),
        "outputscale": float(model.covar_module.outputscale.detach()),
        "lengthscales": model.covar_module.base_kernel.lengthscale.detach().reshape(-1).tolist(),
        "values": values,
        "torch": torch.__version__,
        "gpytorch": gpytorch.__version__,
    }


for _method in METHODS:
    if _method != "svgp":
        contender(CASE, _method)(partial(_train_and_predict, _method))


@contender(CASE, "svgp")
def svgp(*, dataset: str, seed: int, rows: int | None, steps: int, rate: float, seconds: float) -> Outcome:
    """The rival, with the seconds that Russian roulette took to train."""
    data = load_random_split(dataset, seed, rows=rows)
    torch.manual_seed(seed)  # GPyTorch starts its variational mean at random
    inducing = random_rows(data.train_x, INDUCING_POINTS)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=inducing.shape[-1]))
    model = VariationalGP(inducing, gpytorch.means.ConstantMean(), kernel)
    training = VariationalTraining(model, gpytorch.likelihoods.GaussianLikelihood(), data.train_x, data.train_y)
    taken = training.train_for(seconds)
    rmse, log_likelihood = prediction_scores(training.predict, data.test_x, data.test_y)
    return {
        "rmse": rmse,
        "nll": -log_likelihood,
        "train_rows": len(data.train_y),
        "seconds_training": seconds,
        "seconds": seconds,
        "steps_taken": taken,
    }


def training_rows(dataset: str, rows: int | None) -> int:
    """How many rows a run trains on."""
    available = round(0.64 * num_rows(dataset))
    return available if rows is None else min(rows, available)


@app.command(name="truncation-table")
def truncation_table(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; all six by default.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="rr-cg, cg, cholesky by default; rff, ss-rff, svgp.")] = None,
    rows: FirstRows = None,
    steps: Annotated[int | None, typer.Option(help="Adam steps; the paper's 1500 or 800 by default.")] = None,
    rate: Annotated[float, typer.Option(help="Learning rate, a tenth of it from 50, 70 and 90 % on.")] = 0.01,
    splits: Annotated[int, typer.Option(help="Random splits, by seed; the paper has three.")] = 3,
    cholesky_rows: Annotated[int, typer.Option(help="No Cholesky beyond.")] = CHOLESKY_ROWS,
    minutes: Minutes = DEFAULT_MINUTES,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """RMSE and NLL by the protocol of Potapczynski et al. 2021, beside theirs. Goes on where it was interrupted."""
    for option, given, known in (
        ("dataset", dataset, published.TRUNCATION),
        ("method", method, METHODS),
    ):
        if unknown := set(given or ()) - set(known):
            raise typer.BadParameter(f"{option} must be one of {', '.join(known)}, got {', '.join(sorted(unknown))}.")
    runs = [
        planned
        for name in dataset or list(published.TRUNCATION)
        for seed in range(splits)
        for planned in planned_runs(
            name, seed, method or list(CHOSEN), rows, steps or STEPS[name], rate, cholesky_rows, minutes
        )
    ]
    run_and_show(RESULTS / "truncation_table.json", runs, threads, lambda found: [table(found)])


def planned_runs(
    dataset: str,
    seed: int,
    methods: list[str],
    rows: int | None,
    steps: int,
    rate: float,
    cholesky_rows: int,
    minutes: float = DEFAULT_MINUTES,
) -> list[Run]:
    """Of one split; SVGP has the time of Russian roulette, and Cholesky stays out where there are too many rows."""
    options = {"dataset": dataset, "seed": seed, "rows": rows, "steps": steps, "rate": rate}
    pace = Run(CASE, "rr-cg", options)
    piece = {"minutes": minutes}
    return [
        Run(CASE, method, options, pace) if method == "svgp" else Run(CASE, method, options, piece=piece)
        for method in methods
        if method != "cholesky" or training_rows(dataset, rows) <= cholesky_rows
    ]


def table(found: Sequence[Measured]) -> Table:
    """A row a run."""
    rows = []
    for measured in found:
        run, done = measured.run, measured.outcome
        theirs = published.TRUNCATION[run.options["dataset"]].get(run.contender)
        rows.append(
            [
                run.options["dataset"],
                str(done["train_rows"]),
                f"{done.get('steps_taken', run.options['steps'])}" + ("" if measured.is_finished else ", unfinished"),
                str(run.options["seed"]),
                run.contender,
                *beside((done["rmse"], done["nll"]), theirs),
                f"{done['seconds_training'] / 60:.1f}",
            ]
        )
    return Table(
        "published: means over three splits, with all rows and steps",
        ["data", "rows", "steps", "split", "method", "RMSE", "published", "NLL", "published", "minutes"],
        rows,
    )


def preset_runs(preset: Preset) -> list[Run]:
    """All methods; the paper's data sets and steps, or less."""
    if preset is Preset.PAPER:
        return [
            planned
            for name in published.TRUNCATION
            for seed in range(3)
            for planned in planned_runs(name, seed, list(METHODS), None, STEPS[name], 0.01, CHOLESKY_ROWS)
        ]
    rows, steps = (700, 3) if preset is Preset.SMOKE else (2000, 100)
    return planned_runs("pol", 0, list(METHODS), rows, steps, 0.05, CHOLESKY_ROWS)


register(
    Case(
        CASE,
        "Training without the bias of truncation, by the protocol of Potapczynski et al. 2021.",
        preset_runs,
        lambda found: [table(found)],
    )
)

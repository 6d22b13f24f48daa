"""Multi-class classification at equal wall-clock time, learning included: full-kernel Laplace, the published algorithm,
variational inducing points, and a subset of the data.

All start at the same hyperparameters (outputscale 5, lengthscale half the median distance) with one Matern-3/2 kernel for
all classes. Every contender reports accuracy and negative log-likelihood (NLL) over time.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import gpytorch
import torch
import typer
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.cases.laplace_pictures import over_time
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, exit_if_missing, names_of
from benchmarks.datasets import Labelled, gaussian_mixture, mnist_digits
from benchmarks.literal_newton import LiteralNewton
from benchmarks.metrics import classification_scores
from benchmarks.runner import CONTENDERS, RESULTS, Outcome, contender
from benchmarks.runs import Measured, Run, SavedRuns
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from benchmarks.variational import VariationalGP, VariationalTraining, random_rows
from gpy_iterative.laplace.likelihoods.predictive import LatentMarginals, PredictiveMethod, class_probabilities

CASE = "laplace-classification"
#: Points on which hyperparameters are learned before all are used.
LEARNING_ROWS = 2000
#: Of SVGP.
INDUCING_POINTS, BATCH_SIZE = 1000, 1024
#: Draws of latent functions for class probabilities, of all contenders.
NUM_SAMPLES = 200
#: Of ours, for the measurements of kind "refined": further ones change little.
REFINEMENTS = 1
#: Points of the subset-of-data model: dense factors of ten times as many.
SUBSET_ROWS = 300


def labelled(dataset: str, rows: int) -> Labelled:
    """Training and test points of "mnist" (8,000 and 2,000 at the most) or "mixture"."""
    return mnist_digits(rows) if dataset == "mnist" else gaussian_mixture(rows)


def class_kernel(lengthscale: float) -> gpytorch.kernels.ScaleKernel:
    """Matern-3/2 with outputscale 5: where all contenders start."""
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
    kernel.outputscale = 5.0
    kernel.base_kernel.lengthscale = lengthscale
    return kernel


class LaplaceClassifier(gpi.models.IterativeLaplaceGP):
    """Zero mean, one scaled Matern-3/2 kernel for all classes."""

    def __init__(self, x: Tensor, y: Tensor, classes: int, lengthscale: float, **options: Any) -> None:
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
        super().__init__(x, y, likelihood, **options)
        self.covar_module = class_kernel(lengthscale)
        self.classes = classes

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(x.new_zeros(self.classes, len(x)), self.covar_module(x))


@dataclass
class Clock:
    """Wall-clock time without what is spent on measuring, and the measurements."""

    data: Labelled
    seconds: float
    curve: list[dict[str, Any]] = field(default_factory=list)
    paused: float = 0.0

    def __post_init__(self) -> None:
        self.start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.start - self.paused

    def measure(self, name: str, probabilities: Tensor, seconds: float, **more: float) -> None:
        self.curve.append(
            {"seconds": seconds, "kind": name, **classification_scores(probabilities, self.data.test_y), **more}
        )

    def outcome(self, **more: Any) -> Outcome:
        return {"curve": self.curve, **more}


def start_lengthscale(x: Tensor) -> float:
    """Half the median distance of the first thousand points."""
    part = x[:1000]
    return float(torch.pdist(part).median()) / 2


def _measure_laplace(clock: Clock, model: LaplaceClassifier, refinements: int = 0) -> float:
    """The seconds that the mode and its refinements took, which count; predicting the test points does not."""
    begin = clock.now()
    model.eval()
    for count in range(refinements + 1):
        model.num_refinements = count
        report = model.posterior().report
        seconds, before = clock.now(), time.perf_counter()
        mean, covariance = model.posterior().moments(clock.data.test_x)
        for method in get_args(PredictiveMethod):
            parts = zip(mean.split(1000), covariance.split(1000), strict=True)
            generator = torch.Generator().manual_seed(1)
            probabilities = torch.cat(
                [
                    class_probabilities(model.likelihood, LatentMarginals(*part, method, NUM_SAMPLES, generator))
                    for part in parts
                ]
            )
            kind = f"refined {method}" if count else method
            clock.measure(kind, probabilities, seconds, products=report.epochs, rank=report.rank)
        clock.paused += time.perf_counter() - before
    model.num_refinements = 0
    model.train()
    return clock.now() - begin


@contender(CASE, "ours")
def ours(*, dataset: str, rows: int, seconds: float, max_rank: int) -> Outcome:
    """Hyperparameters learned on a part of the data by the evidence, then the mode on all of them, and again with both; the
    first and the last mode are refined, too.
    """
    data = labelled(dataset, rows)
    clock = Clock(data, seconds)
    solver = gpi.solvers.LaplaceNewton(max_rank=max_rank, num_covariance_actions=0)
    classes, lengthscale = data.num_classes, start_lengthscale(data.train_x)
    part = slice(0, min(LEARNING_ROWS, len(data.train_x)))
    model = LaplaceClassifier(data.train_x[part], data.train_y[part], classes, lengthscale, solver=solver)
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, solver=solver, num_probes=4, generator=0)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.3)
    # A step's seconds, and those of the last mode with its refinement.
    length, finish = 0.0, 0.0
    steps, full, refined = 0, False, False
    while clock.now() + length + finish < seconds:
        begin = clock.now()
        if not full and (clock.now() > 0.4 * seconds or steps == 25):
            full = True
            model.set_train_data(data.train_x, data.train_y)
            finish = _measure_laplace(clock, model, REFINEMENTS)
            refined = True
            optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
            if clock.now() > 0.7 * seconds:
                break
            begin, length = clock.now(), 0.0
        optimiser.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimiser.step()
        steps += 1
        length = clock.now() - begin
        refined = False
        if full and steps % 5 == 0:
            _measure_laplace(clock, model)
    if not refined:
        if not full:  # the budget went into learning
            model.set_train_data(data.train_x, data.train_y)
        _measure_laplace(clock, model, REFINEMENTS)
    kernel = model.covar_module
    return clock.outcome(
        steps=steps, lengthscale=float(kernel.base_kernel.lengthscale), outputscale=float(kernel.outputscale)
    )


@contender(CASE, "published")
def published(*, dataset: str, rows: int, seconds: float, max_rank: int) -> Outcome:
    """The published algorithm as printed, at the starting hyperparameters; five inner steps."""
    data = labelled(dataset, rows)
    clock = Clock(data, seconds)
    for outer in (1, 2, 3, 5):
        solver = LiteralNewton(max_outer=outer, max_inner=5, max_rank=max_rank)
        model = LaplaceClassifier(
            data.train_x, data.train_y, data.num_classes, start_lengthscale(data.train_x), solver=solver
        )
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it stops where it is told to
            _measure_laplace(clock, model)
        if time.perf_counter() - begin > seconds:
            break
    return clock.outcome()


@contender(CASE, "subset of data")
def subset(*, dataset: str, rows: int, seconds: float, max_rank: int) -> Outcome:
    """Dense Laplace on the first few hundred points, hyperparameters learned by its exact evidence."""
    data = labelled(dataset, rows)
    clock = Clock(data, seconds)
    x, y = data.train_x[:SUBSET_ROWS], data.train_y[:SUBSET_ROWS]
    solver = gpi.solvers.LaplaceCholesky(tolerance=1e-4)
    model = LaplaceClassifier(x, y, data.num_classes, start_lengthscale(data.train_x), solver=solver)
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, solver=solver)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.3)
    steps = 0
    while clock.now() < 0.9 * seconds and steps < 30:
        optimiser.zero_grad()
        (-mll(model(x), y)).backward()
        optimiser.step()
        steps += 1
    _measure_laplace(clock, model)
    return clock.outcome(steps=steps)


def svgp(rate: float, *, dataset: str, rows: int, seconds: float, max_rank: int) -> Outcome:
    """Variational inducing points at one learning rate."""
    data = labelled(dataset, rows)
    clock = Clock(data, seconds)
    torch.manual_seed(0)  # GPyTorch's likelihood samples
    training = variational_training(data, rate)
    steps, due = 0, seconds / 4
    while clock.now() < seconds:
        training.step(0.0)
        steps += 1
        if clock.now() > due or clock.now() > seconds:
            due += seconds / 4
            _measure_variational(clock, training.model)
    return clock.outcome(steps=steps)


def variational_training(data: Labelled, rate: float) -> VariationalTraining:
    """A thousand inducing points that all classes share."""
    kernel = class_kernel(start_lengthscale(data.train_x))
    inducing = random_rows(data.train_x, INDUCING_POINTS)
    model = VariationalGP(inducing, gpytorch.means.ZeroMean(), kernel, data.num_classes)
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=data.num_classes, mixing_weights=False)
    return VariationalTraining(
        model, likelihood, data.train_x, data.train_y, batch_size=BATCH_SIZE, rate=rate, decay=1.0
    )


@torch.no_grad()
def _measure_variational(clock: Clock, model: VariationalGP) -> None:
    seconds, before = clock.now(), time.perf_counter()
    model.eval()
    generator = torch.Generator().manual_seed(1)
    parts = []
    for x in clock.data.test_x.split(500):
        latent: MultitaskMultivariateNormal = model(x)
        mean, deviation = latent.mean, latent.variance.sqrt()
        base = torch.randn(NUM_SAMPLES, *mean.shape, generator=generator)
        parts.append(torch.softmax(mean + deviation * base, -1).mean(0))
    clock.measure("mc", torch.cat(parts), seconds)
    clock.paused += time.perf_counter() - before
    model.train()


for _rate in (0.001, 0.01, 0.05):
    contender(CASE, f"SVGP, rate {_rate}")(partial(svgp, _rate))


def table(found: Sequence[Measured], title: str) -> Table:
    """Every contender's last measurement of every kind of prediction."""
    rows = []
    for measured in found:
        last = {point["kind"]: point for point in measured.outcome["curve"]}
        for kind, point in last.items():
            rows.append(
                [
                    measured.run.contender,
                    str(kind),
                    f"{point['accuracy']:.4f}",
                    f"{point['nll']:.4f}",
                    f"{point['ece']:.3f}",
                    f"{point['products']:.0f}" if "products" in point else "",
                    f"{point['seconds']:.0f}",
                    f"{measured.outcome['peak_memory_mb']:.0f}",
                ]
            )
    return Table(title, ["contender", "prediction", "accuracy", "NLL", "ECE", "products", "s", "MB"], rows)


@app.command()
def laplace(
    dataset: Annotated[str, typer.Option(help="mixture or mnist.")] = "mixture",
    rows: Annotated[int, typer.Option(help="Training points; MNIST has 8,000 at the most.")] = 10_000,
    seconds: Annotated[float, typer.Option(help="Wall-clock budget of each contender, learning included.")] = 200.0,
    max_rank: Annotated[int, typer.Option(help="Actions that are kept.")] = 100,
    only: Annotated[
        list[str] | None, names_of(CONTENDERS[CASE], "Contenders, by name; goes on with saved ones.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for the picture over time.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Classification at equal time: Laplace, as published, SVGP, subset of data. Goes on where it was interrupted."""
    if dataset not in ("mixture", "mnist"):
        raise typer.BadParameter(f"dataset must be mixture or mnist, got {dataset!r}.")
    options = {"dataset": dataset, "rows": rows, "seconds": seconds, "max_rank": max_rank}
    runs = [Run(CASE, name, options) for name in only or list(CONTENDERS[CASE])]
    found = SavedRuns(RESULTS / f"laplace_{dataset}.json").execute(runs, threads, console)
    console.print(
        table(found, f"{dataset}, {rows} training points, {seconds:.0f} s each, {threads} threads").for_terminal()
    )
    if pictures is not None:
        over_time({measured.run.contender: measured.outcome for measured in found}, pictures / f"laplace_{dataset}.svg")
    exit_if_missing(found, runs)


#: Data sets, rows and seconds of the presets.
SIZES = {
    Preset.SMOKE: [("mixture", 400, 2.0)],
    Preset.QUICK: [("mixture", 5000, 30.0)],
    Preset.PAPER: [("mixture", 100_000, 3600.0), ("mnist", 8000, 600.0)],
}


def preset_runs(preset: Preset) -> list[Run]:
    """All contenders on each data set."""
    return [
        Run(CASE, name, {"dataset": dataset, "rows": rows, "seconds": seconds, "max_rank": 100})
        for dataset, rows, seconds in SIZES[preset]
        for name in CONTENDERS[CASE]
    ]


def _by_dataset(found: Sequence[Measured]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for measured in found:
        groups.setdefault(measured.run.options["dataset"], []).append(measured)
    return groups


def _tables(found: Sequence[Measured]) -> list[Table]:
    return [
        table(group, "{dataset}, {rows} training points, {seconds:.0f} s each".format(**group[0].run.options))
        for group in _by_dataset(found).values()
    ]


def _pictures(found: Sequence[Measured], folder: Path) -> list[Path]:
    return [
        over_time({m.run.contender: m.outcome for m in group}, folder / f"laplace_{name}.svg")
        for name, group in _by_dataset(found).items()
    ]


register(
    Case(
        CASE,
        "Classification at equal time; the mixture and MNIST studies of Tatzel et al.",
        preset_runs,
        _tables,
        _pictures,
        note="[Measured](measured.md#beside-svgp) has a larger run.",
        shows_tables=False,
    )
)

"""Multi-class classification at equal wall-clock time, learning included: full-kernel Laplace, the published algorithm,
variational inducing points, and a subset of the data.

All start at the same hyperparameters (outputscale 5, lengthscale half the median distance) with one Matern-3/2 kernel for
all classes. Every contender reports accuracy and negative log-likelihood (NLL) over time.
"""

import json
import time
import warnings
from dataclasses import dataclass, field
from typing import Any, get_args

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.datasets import Labelled, gaussian_mixture, mnist_digits
from benchmarks.runner import RESULTS, Outcome, contender
from gpy_iterative.likelihoods.predictive import PredictiveMethod, class_probabilities

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


class LaplaceClassifier(gpi.models.IterativeLaplaceGP):
    """Zero mean, one scaled Matern-3/2 kernel for all classes."""

    def __init__(self, x: Tensor, y: Tensor, classes: int, lengthscale: float, **options: Any) -> None:
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
        super().__init__(x, y, likelihood, **options)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
        self.covar_module.outputscale = 5.0
        self.covar_module.base_kernel.lengthscale = lengthscale
        self.classes = classes

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(x.new_zeros(self.classes, len(x)), self.covar_module(x))


class VariationalClassifier(gpytorch.models.ApproximateGP):
    """The same prior with inducing points that all classes share."""

    def __init__(self, inducing: Tensor, classes: int, lengthscale: float) -> None:
        batch = torch.Size([classes])
        distribution = CholeskyVariationalDistribution(len(inducing), batch_shape=batch)
        inner = VariationalStrategy(self, inducing.clone(), distribution, learn_inducing_locations=True)
        super().__init__(IndependentMultitaskVariationalStrategy(inner, num_tasks=classes))
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
        self.covar_module.outputscale = 5.0
        self.covar_module.base_kernel.lengthscale = lengthscale

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(x.new_zeros(x.shape[:-1]), self.covar_module(x))


def scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, NLL and the 15-bin expected calibration error of class probabilities [t, C]."""
    confidence, label = probabilities.double().max(-1)
    right = (label == y).double()
    error = 0.0
    for low in torch.linspace(0, 1, 16, dtype=torch.float64)[:-1]:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            error += float(inside.double().mean() * (right[inside].mean() - confidence[inside].mean()).abs())
    chosen = probabilities.double().gather(-1, y.unsqueeze(-1)).clamp_min(1e-300)
    return {"accuracy": float(right.mean()), "nll": float(-chosen.log().mean()), "ece": error}


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
        self.curve.append({"seconds": seconds, "kind": name, **scores(probabilities, self.data.test_y), **more})

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
        solution = model.fit_mode()
        seconds, before = clock.now(), time.perf_counter()
        products, rank = sum(part.epochs for part in model.posterior().stats), solution.actions.shape[-1]
        mean, covariance = model.posterior().moments(clock.data.test_x)
        for method in get_args(PredictiveMethod):
            parts = zip(mean.split(1000), covariance.split(1000), strict=True)
            generator = torch.Generator().manual_seed(1)
            probabilities = torch.cat(
                [class_probabilities(model.likelihood, *part, method, NUM_SAMPLES, generator) for part in parts]
            )
            kind = f"refined {method}" if count else method
            clock.measure(kind, probabilities, seconds, products=products, rank=rank)
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
    solver = gpi.solvers.LaplaceNewton(max_rank=max_rank)
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
        solver = gpi.solvers.LaplaceNewton(literal=True, max_outer=outer, max_inner=5, max_rank=max_rank)
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


def _svgp(rate: float, *, dataset: str, rows: int, seconds: float, max_rank: int) -> Outcome:
    data = labelled(dataset, rows)
    clock = Clock(data, seconds)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # GPyTorch's likelihood samples
    chosen = torch.randperm(len(data.train_x), generator=generator)[:INDUCING_POINTS]
    model = VariationalClassifier(data.train_x[chosen], data.num_classes, start_lengthscale(data.train_x))
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=data.num_classes, mixing_weights=False)
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(data.train_x))
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    steps, due = 0, seconds / 4
    while clock.now() < seconds:
        batch = torch.randint(len(data.train_x), (BATCH_SIZE,), generator=generator)
        optimiser.zero_grad()
        (-mll(model(data.train_x[batch]), data.train_y[batch])).backward()
        optimiser.step()
        steps += 1
        if clock.now() > due or clock.now() > seconds:
            due += seconds / 4
            _measure_variational(clock, model)
    return clock.outcome(steps=steps)


@torch.no_grad()
def _measure_variational(clock: Clock, model: VariationalClassifier) -> None:
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

    @contender(CASE, f"SVGP, rate {_rate}")
    def svgp(*, dataset: str, rows: int, seconds: float, max_rank: int, rate: float = _rate) -> Outcome:
        """Variational inducing points at one learning rate."""
        return _svgp(rate, dataset=dataset, rows=rows, seconds=seconds, max_rank=max_rank)


def saved_outcomes(name: str, options: dict[str, Any]) -> dict[str, Outcome]:
    """What an interrupted run with the same options has saved."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    return content["outcomes"] if content["options"] == options else {}


def summary(outcomes: dict[str, Outcome]) -> list[list[str]]:
    """Rows for printing: every contender's last measurement of every kind of prediction."""
    rows = []
    for name, outcome in outcomes.items():
        last = {point["kind"]: point for point in outcome["curve"]}
        for kind, point in last.items():
            rows.append(
                [
                    name,
                    str(kind),
                    f"{point['accuracy']:.4f}",
                    f"{point['nll']:.4f}",
                    f"{point['ece']:.3f}",
                    f"{point['products']:.0f}" if "products" in point else "",
                    f"{point['seconds']:.0f}",
                    f"{outcome['peak_memory_mb']:.0f}",
                ]
            )
    return rows

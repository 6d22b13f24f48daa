"""Training runs over kernels, sizes, dtypes, inputs, solvers and estimators, and what each of them has to keep.

A gradient has to be as near to the exact one as its solver's reported residuals and its probes' own spread allow; both are
measured, so that a run whose budget was too short for its tolerance is held to what it says of itself.
"""

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpytorch import kernels
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from gpy_iterative import mlls, solvers
from gpy_iterative.training.report import MarginalLogLikelihoodReport
from tests.exact.gaussian_models import Regression

#: Standard errors, of few draws each, that an estimate may be off; a whole design makes some thousand comparisons.
STANDARD_ERRORS = 8
#: What float32 may take from a gradient: a part of its two terms, which cancel.
ROUNDING = 0.01
#: Random residuals by which a gradient's sensitivity to them is measured, and how much larger it may be along others.
RESIDUALS, WORST = 4, 3.0
#: Rows of the exact matrix that are differentiated at a time.
ROWS = 256

KERNELS: dict[str, Callable[[int], kernels.Kernel]] = {
    "RBF": lambda d: kernels.RBFKernel(),
    "RBF ARD": lambda d: kernels.RBFKernel(ard_num_dims=d),
    "Matern 1/2": lambda d: kernels.MaternKernel(nu=0.5),
    "Matern 3/2": lambda d: kernels.MaternKernel(nu=1.5),
    "Matern 5/2": lambda d: kernels.MaternKernel(nu=2.5, ard_num_dims=d),
    "RQ": lambda d: kernels.RQKernel(),
    "periodic": lambda d: kernels.PeriodicKernel(),
    "cosine": lambda d: kernels.CosineKernel(),
    "spectral mixture": lambda d: kernels.SpectralMixtureKernel(num_mixtures=3, ard_num_dims=d),
    "spectral delta": lambda d: kernels.SpectralDeltaKernel(num_dims=d, num_deltas=40),
    "piecewise 0": lambda d: kernels.PiecewisePolynomialKernel(q=0),
    "piecewise 2": lambda d: kernels.PiecewisePolynomialKernel(q=2),
    "RFF": lambda d: kernels.RFFKernel(num_samples=40, num_dims=d),
    "constant": lambda d: kernels.ConstantKernel(),
}
STRUCTURES: dict[str, Callable[[kernels.Kernel], kernels.Kernel]] = {
    "bare": lambda kernel: kernel,
    "scaled": kernels.ScaleKernel,
    "sum": lambda kernel: kernels.ScaleKernel(kernel) + kernels.ScaleKernel(kernels.RBFKernel()),
    "product": lambda kernel: kernels.ScaleKernel(kernel * kernels.MaternKernel()),
    "sum of products": lambda kernel: kernels.ScaleKernel(kernel * kernels.RBFKernel()) + kernel,
}
#: With budgets: to the end of the defaults' descents would take minutes.
SOLVERS: dict[str, solvers.Solver | None] = {
    "default": None,
    "Cholesky": solvers.Cholesky(),
    "projections": solvers.AlternatingProjections(),
    "conjugate gradients": solvers.ConjugateGradients(),
    "descent": solvers.StochasticGradientDescent(max_epochs=10),
    "dual descent": solvers.StochasticDualDescent(max_epochs=10),
    "sketches": solvers.AcceleratedSketchAndProject(max_epochs=100),
    "sketches of rank 50": solvers.AcceleratedSketchAndProject(rank=50, max_epochs=30),
}
ESTIMATORS = {
    "Hutchinson": mlls.HutchinsonMarginalLogLikelihood,
    "pathwise": partial(mlls.PathwiseMarginalLogLikelihood, num_frequencies=100),
}
WITHOUT_DENSITY = {
    "periodic",
    "cosine",
    "spectral mixture",
    "spectral delta",
    "piecewise 0",
    "piecewise 2",
    "RFF",
    "constant",
}
#: Kernels whose own code takes sines of large numbers: float32 does not hold what they would be.
WAVES = {"spectral mixture", "spectral delta", "RFF"}

FACTORS: dict[str, tuple[Any, ...]] = {
    "kernel": tuple(KERNELS),
    "structure": tuple(STRUCTURES),
    "solver": tuple(SOLVERS),
    "estimator": tuple(ESTIMATORS),
    "size": (500, 3100),
    "dims": (1, 2, 10),
    "dtype": (torch.float32, torch.float64),
    "inputs": ("unit", "twenty", "hours"),
    "rate": (0.1, 0.3),
}


@dataclass(frozen=True)
class Run:
    """One cell of a design: a level of every factor, in the order of `FACTORS`."""

    kernel: str
    structure: str
    solver: str
    estimator: str
    size: int
    dims: int
    dtype: torch.dtype
    inputs: str
    rate: float

    def __str__(self) -> str:
        return ", ".join(str(level).removeprefix("torch.") for level in vars(self).values())


def is_possible(levels: dict[str, Any]) -> bool:
    """Whether there is such a model: pathwise probes need densities, cosines one dimension, waves inputs in all digits."""
    kernel = levels.get("kernel")
    has_density = levels.get("estimator") != "pathwise" or kernel not in WITHOUT_DENSITY
    is_kernel = kernel != "cosine" or levels.get("dims", 1) == 1
    is_held = kernel not in WAVES or (levels.get("inputs"), levels.get("dtype")) != ("hours", torch.float32)
    return has_density and is_kernel and is_held


def design(factors: dict[str, tuple[Any, ...]], strength: int) -> Iterator[Run]:
    """Runs in which all possible combinations of so many factors' levels appear, by a greedy search.

    Each run begins with the first combination that is missing, and takes in random order, for every other factor, the level
    that completes most of the missing ones.
    """

    def combinations(levels: dict[str, Any]) -> set[tuple[tuple[str, Any], ...]]:
        return set(itertools.combinations([(name, levels[name]) for name in factors if name in levels], strength))

    missing = {
        tuple(zip(names, levels, strict=True)): None
        for names in itertools.combinations(factors, strength)
        for levels in itertools.product(*(factors[name] for name in names))
        if is_possible(dict(zip(names, levels, strict=True)))
    }
    shuffle = random.Random(0)
    while missing:
        levels = dict(next(iter(missing)))
        rest = [name for name in factors if name not in levels]
        for name in shuffle.sample(rest, len(rest)):
            choices = [levels | {name: level} for level in factors[name]]
            choices = [choice for choice in shuffle.sample(choices, len(choices)) if is_possible(choice)]
            levels = max(choices, key=lambda choice: len(combinations(choice) & missing.keys()))
        for combination in combinations(levels):
            missing.pop(combination, None)
        yield Run(**levels)


def data(run: Run) -> tuple[Tensor, Tensor]:
    """Inputs [n, d] and smooth targets [n] without noise."""
    generator = torch.Generator().manual_seed(run.size + run.dims)
    x = torch.rand(run.size, run.dims, generator=generator, dtype=torch.float64)
    if run.inputs == "unit":
        y = torch.sin(6 * x[:, 0]) + x[:, -1].square()
    elif run.inputs == "twenty":
        x = 20 * x
        y = torch.sin(x[:, 0] / 2) + torch.cos(x[:, -1] / 4)
    else:  # hours of a year, then hours of a day
        x = torch.cat([8760 * x[:, :1], 24 * x[:, 1:]], dim=-1)
        y = torch.sin(2 * math.pi * x[:, 0] / 720) + torch.cos(2 * math.pi * x[:, -1] / 24)
    return x.to(run.dtype), y.to(run.dtype)


def model_of(run: Run) -> Regression:
    """With GPyTorch's own first hyperparameters."""
    x, y = data(run)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kernel = STRUCTURES[run.structure](KERNELS[run.kernel](run.dims))
        model = Regression(x, y, GaussianLikelihood(), kernel).to(run.dtype)
        model.covar_module(x[:2]).to_dense()  # random features are drawn at the first call
    return model


Gradient = dict[str, Tensor]


@dataclass(frozen=True)
class Exact:
    """The exact value a datum, the gradient's two terms, and how far residuals of relative norm 1 may move either."""

    value: float
    fit: Gradient
    trace: Gradient
    fit_sensitivity: Gradient
    trace_sensitivity: Gradient


def exact(model: Regression) -> Exact:
    """By a dense Cholesky factor in float64, differentiated some rows at a time: a spectral mixture would fill 20 GB."""
    model = copy.deepcopy(model).double()
    x, y = model.train_inputs[0].double(), model.train_targets.double()
    size, named = len(y), dict(model.named_parameters())
    blocks = torch.arange(size).split(ROWS)

    def rows_of(block: Tensor) -> Tensor:
        rows = model.covar_module(x[block], x).to_dense()
        diagonal = model.covar_module(x[block], diag=True) - rows[range(len(block)), block] + model.likelihood.noise
        return rows + torch.zeros_like(rows).scatter(1, block.unsqueeze(-1), 1.0) * diagonal.unsqueeze(-1)

    residual = y - model.mean_module(x)
    with torch.no_grad():
        matrix = torch.cat([rows_of(block) for block in blocks])
        lower = torch.linalg.cholesky(matrix)
        inverse = torch.cholesky_inverse(lower)
        weights = inverse @ residual
        value = -0.5 * (residual @ weights + 2 * lower.diagonal().log().sum() + size * math.log(2 * math.pi)) / size
        scales = residual.norm(), matrix.diagonal().sum().sqrt()  # of the targets, and of a probe
    # With a = H^-1 r: a residual rho moves a^T dH a / 2 by (H^-1 rho)^T dH a, and a probe's (H^-1 xi)^T dH z / 2 likewise.
    generator, zero = torch.Generator().manual_seed(0), torch.zeros(size, dtype=torch.float64)
    of_matrix, of_residual = [torch.outer(weights, weights) / 2, -inverse / 2], [-weights, zero]
    for _ in range(RESIDUALS):
        rho, base = torch.randn(2, size, 1, generator=generator, dtype=torch.float64)
        change = (inverse @ rho).squeeze(-1)
        dual = torch.linalg.solve_triangular(lower.mT, base, upper=True).squeeze(-1)
        of_matrix += [
            WORST * scales[0] * torch.outer(change, weights),
            WORST * scales[1] * torch.outer(change, dual) / 2,
        ]
        of_residual += [-WORST * scales[0] * change, zero]
    gradients = [{name: torch.zeros_like(parameter) for name, parameter in named.items()} for _ in of_matrix]

    def add(output: Tensor, factors: list[Tensor]) -> None:
        for total, factor in zip(gradients, factors, strict=True):
            found = torch.autograd.grad(
                output, list(named.values()), factor / size, retain_graph=True, allow_unused=True
            )
            for name, gradient in zip(named, found, strict=True):
                total[name] += 0 if gradient is None else gradient

    add(residual, of_residual)
    for block in blocks:
        add(rows_of(block), [factor[block] for factor in of_matrix])
    fit, trace, *moved = gradients
    sensitivities = (
        {name: _typical([one[name] for one in part]) for name in named} for part in (moved[::2], moved[1::2])
    )
    return Exact(float(value), fit, trace, *sensitivities)


def _typical(changes: list[Tensor]) -> Tensor:
    """The size of random changes, for every entry no less than what entries have on average: few draws may miss one."""
    found = torch.stack(changes).square().mean(0).sqrt()
    return found.maximum(found.mean())


@dataclass(frozen=True)
class Step:
    """A value a datum, its gradient, and the report."""

    value: float
    gradient: Gradient
    report: MarginalLogLikelihoodReport

    @classmethod
    def of(cls, mll: Any) -> "Step":
        """At the model's hyperparameters; leaves the loss's gradient in `.grad`."""
        mll.model.zero_grad()
        value = mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)
        (-value).backward()
        named = mll.model.named_parameters()
        gradient = {n: torch.zeros_like(p).double() if p.grad is None else -p.grad.double() for n, p in named}
        return cls(float(value.detach()), gradient, mll.report)

    def is_finite(self) -> bool:
        """Whether value and gradient are."""
        return math.isfinite(self.value) and all(torch.isfinite(part).all() for part in self.gradient.values())


def problems_of(run: Run, *, steps: int = 30, draws: int = 6) -> list[str]:
    """Trains for so many steps; what is not finite, and what is too far from exact in the first and the last."""
    model, found = model_of(run), []

    def mll_of(seed: int) -> Any:
        return ESTIMATORS[run.estimator](model.likelihood, model, solver=SOLVERS[run.solver], generator=seed)

    mll, optimizer = mll_of(0), torch.optim.Adam(model.parameters(), lr=run.rate)
    for number in range(steps):
        others = [Step.of(mll_of(1 + seed)) for seed in range(draws)] if number in (0, steps - 1) else []
        step = Step.of(mll)
        if others:
            found += [f"step {number}: {text}" for text in differences(exact(model), step, others)]
        optimizer.step()
        if not step.is_finite() or not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
            found.append(f"step {number}: not finite")
    return found


def differences(truth: Exact, step: Step, others: list[Step]) -> list[str]:
    """What is wrong with a step of training, and with the mean of others that draw for themselves."""
    found, report = [], step.report
    error = abs(step.value - truth.value)
    if report.status is solvers.SolveStatus.CONVERGED and error > 8 * float(report.value_sem) + 0.003 + ROUNDING * abs(
        truth.value
    ):
        found.append(f"value {step.value:.5g}, exact {truth.value:.5g}, error reported {float(report.value_sem):.2g}")
    for name, fit in truth.fit.items():
        expected = fit + truth.trace[name]
        samples = torch.stack([other.gradient[name] for other in others])
        spread = samples.std(0)
        for what, gradient, sem, steps in (
            ("of the run", step.gradient[name], spread, [step]),
            ("on average", samples.mean(0), spread / len(others) ** 0.5, others),
        ):
            targets = max(other.report.residual_targets for other in steps)
            probes = max(other.report.residual_probes or 0.0 for other in steps)
            allowed = STANDARD_ERRORS * sem + ROUNDING * (fit.abs() + truth.trace[name].abs()) + 1e-4
            allowed = allowed + targets * truth.fit_sensitivity[name] + probes * truth.trace_sensitivity[name]
            excess = ((gradient - expected).abs() / allowed).flatten()
            if not excess.max() <= 1:
                pair = (float(part.flatten()[excess.argmax()]) for part in (gradient, expected, allowed))
                found.append(
                    "{} {}: {:.4g}, exact {:.4g}, allowed {:.2g}; {}".format(name, what, *pair, report.status.name)
                )
    return found

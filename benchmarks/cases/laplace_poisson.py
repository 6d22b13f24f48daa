"""Kernel products to the mode: the published algorithms as printed beside this package's, on counts.

The setting of the Poisson study of Tatzel et al.: 100 points on [0, 1], RBF with lengthscale .1 and outputscale 5, log
link; 100 inner steps split over Newton steps in four ways. And 300 points on [0, 4]^2, lengthscale 1, outputscale 1.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import app, finish, show
from benchmarks.literal_newton import LiteralNewton
from benchmarks.runner import Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.likelihoods import PointwiseLikelihood, PoissonLogLikelihood
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.linear_solvers.solution import SolveProgress
from gpy_iterative.solvers import LaplaceCholesky, LaplaceNewton, LaplaceSolver

#: Newton steps times inner steps.
SCHEDULES = {"5x20": (5, 20), "10x10": (10, 10), "20x5": (20, 5), "100x1": (100, 1)}
#: The relative gradient at which the mode counts as reached.
REACHED = 1e-3


def study(draw: int) -> tuple[LatentPrior, PointwiseLikelihood]:
    """One draw of the published study."""
    x = torch.linspace(0, 1, 100, dtype=torch.float64).unsqueeze(-1)
    return _counts(x, 0.1, 5.0, draw)


def larger(draw: int) -> tuple[LatentPrior, PointwiseLikelihood]:
    """Three hundred points in two dimensions."""
    generator = torch.Generator().manual_seed(1000 + draw)
    return _counts(4 * torch.rand(300, 2, generator=generator, dtype=torch.float64), 1.0, 1.0, draw)


def _counts(x: Tensor, lengthscale: float, outputscale: float, draw: int) -> tuple[LatentPrior, PointwiseLikelihood]:
    operator = RadialKernelLinearOperator(
        x / lengthscale, torch.tensor(outputscale, dtype=x.dtype), function=RBF, products=KernelProducts()
    )
    kernel = operator.to_dense()
    kernel.diagonal().add_(1e-8)
    generator = torch.Generator().manual_seed(draw)
    f = torch.linalg.cholesky(kernel) @ torch.randn(len(x), generator=generator, dtype=x.dtype)
    counts = torch.poisson(f.exp(), generator=generator)
    prior = LatentPrior(operator, torch.zeros(len(x), 1, dtype=x.dtype))
    return prior, PointwiseLikelihood(PoissonLogLikelihood(), counts, 1)


def run(solver: LaplaceSolver, prior: LatentPrior, likelihood: PointwiseLikelihood) -> dict[str, Any]:
    """Products until the relative gradient is below .001 (None: never), and the error of f at the end."""
    reached: list[float] = []

    def watch(step: SolveProgress) -> None:
        if not reached and step.residual_norms["mode"] <= REACHED:
            reached.append(step.epochs)

    exact = LaplaceCholesky().solve(prior, likelihood).latent
    try:
        solution = solver.solve(prior, likelihood, callback=watch)
    except NonFiniteError:
        return {"products": None, "error": None, "total": None, "largest_count": float(likelihood.targets.max())}
    return {
        "products": reached[0] if reached else None,
        "error": float((solution.latent - exact).abs().max()),
        "total": solution.stats.epochs,
        "largest_count": float(likelihood.targets.max()),
    }


def table(draws: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Schedule -> algorithm -> one outcome a draw."""
    outcomes: dict[str, dict[str, list[dict[str, Any]]]] = {}
    problems = {name: (study, *steps) for name, steps in SCHEDULES.items()} | {"n = 300": (larger, 60, 20)}
    for name, (make, outer, inner) in problems.items():
        algorithms = {
            "published": LiteralNewton(max_outer=outer, max_inner=inner, tolerance=1e-6),
            "ours": LaplaceNewton(max_outer=max(outer, 20), max_inner=inner, tolerance=1e-6),
        }
        outcomes[name] = {
            algorithm: [run(solver, *make(draw)) for draw in range(draws)] for algorithm, solver in algorithms.items()
        }
    return outcomes


HEADER = ["schedule", "published reaches", "ours reaches", "published", "ours", "ratio", "worst ratio"]


def summary(outcomes: dict[str, dict[str, list[dict[str, Any]]]]) -> list[list[str]]:
    """Rows for printing: draws that reached the mode, and products on those where the published algorithm does."""
    rows = []
    for schedule, by_algorithm in outcomes.items():
        both = [
            (ours["products"], theirs["products"])
            for ours, theirs in zip(by_algorithm["ours"], by_algorithm["published"], strict=True)
            if ours["products"] is not None and theirs["products"] is not None
        ]
        count = {name: sum(o["products"] is not None for o in runs) for name, runs in by_algorithm.items()}
        means = [sum(column) / len(both) for column in zip(*both, strict=True)] if both else [math.nan, math.nan]
        worst = max((ours / theirs for ours, theirs in both), default=math.nan)
        rows.append(
            [
                schedule,
                f"{count['published']} of {len(by_algorithm['published'])}",
                f"{count['ours']} of {len(by_algorithm['ours'])}",
                f"{means[1]:.0f}",
                f"{means[0]:.0f}",
                f"{means[0] / means[1]:.2f}",
                f"{worst:.2f}",
            ]
        )
    return rows


@contender("laplace-poisson", "all")
def poisson(*, draws: int) -> Outcome:
    """Everything."""
    return {"outcomes": table(draws)}


@app.command(name="laplace-poisson")
def laplace_poisson(draws: int = 10) -> None:
    """Kernel products to the mode of Poisson counts, the published algorithm beside ours; about a minute."""
    outcomes = table(draws)
    show(
        f"{draws} draws; products to a relative gradient of .001, where both reach it",
        HEADER,
        summary(outcomes),
    )
    finish("laplace_poisson", {"draws": draws}, torch.get_num_threads(), outcomes=outcomes)


DRAWS = {Preset.SMOKE: 1, Preset.QUICK: 4, Preset.PAPER: 10}


def _tables(found: Sequence[Measured]) -> list[Table]:
    return [
        Table(
            f"{measured.run.options['draws']} draws; products to a relative gradient of .001, where both reach it",
            HEADER,
            summary(measured.outcome["outcomes"]),
        )
        for measured in found
    ]


register(
    Case(
        "laplace-poisson",
        "Kernel products to the mode, the Poisson study of Tatzel et al.",
        lambda preset: [Run("laplace-poisson", "all", {"draws": DRAWS[preset]})],
        _tables,
        note="[Measured](measured.md#kernel-products-to-the-mode) has a larger run.",
        shows_tables=False,
    )
)

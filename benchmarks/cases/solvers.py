"""Epochs to tolerance: conjugate gradients under every preconditioner, and every other solver, on five kernel systems."""

from typing import Annotated

import torch
from torch import Tensor

from benchmarks.command_line import app, console, finish, names_of, show
from benchmarks.datasets import load
from benchmarks.runner import Outcome
from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.preconditioners import LowRankPlusVecchia, Nystrom, PivotedCholesky, RandomlyPivotedCholesky, Vecchia
from gpy_iterative.solvers import (
    AcceleratedSketchAndProject,
    AlternatingProjections,
    ConjugateGradients,
    IterativeSolver,
    StochasticDualDescent,
    StochasticGradientDescent,
)

#: name -> data set, noise variance, lengthscale; Matern-3/2, outputscale 1, standardised inputs. A number instead
#: of a data set is the dimension of uniform points in [-2, 2]^d.
SYSTEMS: dict[str, tuple[str | int, float, float]] = {
    "easy": ("elevators", 0.1, 1.0),
    "small noise": ("kin40k", 0.001, 1.0),
    "hard": ("pol", 0.01, 3.0),
    "plane": (2, 0.001, 0.5),
    "space": (3, 0.01, 0.3),
}
#: Signs beside the targets.
PROBES = 15


def system(name: str, rows: int) -> tuple[NoisyLinearOperator, Tensor]:
    """H [n, n] and its right-hand sides [n, 16], in float64."""
    dataset, noise, lengthscale = SYSTEMS[name]
    x, y = _data(dataset, rows)
    kernel = RadialKernelLinearOperator(x / lengthscale, torch.tensor(1.0).to(x), function=MATERN32)
    signs = torch.randint(0, 2, (len(y), PROBES), generator=torch.Generator().manual_seed(0)).to(y) * 2 - 1
    return NoisyLinearOperator(kernel, torch.full_like(y, noise)), torch.cat([y.unsqueeze(-1), signs], dim=-1)


def _data(dataset: str | int, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs [n, d] and targets [n]."""
    if isinstance(dataset, int):
        x = torch.rand(rows, dataset, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 - 2
        return x, torch.sin(3 * x[:, 0]) + torch.cos(2 * x[:, 1] + x[:, 0])
    data = load(dataset, rows=rows, dtype=torch.float64)
    return data.train_x[:rows], data.train_y[:rows]


def _solvers(tolerance: float, max_epochs: float, block_size: int) -> dict[str, IterativeSolver]:
    common = {"tolerance": tolerance, "max_epochs": max_epochs}
    recipes = {
        "none": None,
        "PivotedCholesky(100)": PivotedCholesky(100),
        "RandomlyPivotedCholesky(100)": RandomlyPivotedCholesky(100),
        "Nystrom(100)": Nystrom(100),
        "PivotedCholesky(500)": PivotedCholesky(500),
        "RandomlyPivotedCholesky(500)": RandomlyPivotedCholesky(500),
        "Nystrom(500)": Nystrom(500),
        "Vecchia(10)": Vecchia(10),
        "Vecchia(30)": Vecchia(30),
        "LowRankPlusVecchia()": LowRankPlusVecchia(),
    }
    solvers: dict[str, IterativeSolver] = {
        f"CG, {name}": ConjugateGradients(preconditioner=recipe, **common) for name, recipe in recipes.items()
    }
    return solvers | {
        "AlternatingProjections": AlternatingProjections(block_size=block_size, fallback=None, **common),
        "AlternatingProjections, with its fallback": AlternatingProjections(block_size=block_size, **common),
        "StochasticGradientDescent": StochasticGradientDescent(batch_size=block_size, **common),
        "StochasticDualDescent": StochasticDualDescent(batch_size=block_size, **common),
        "AcceleratedSketchAndProject": AcceleratedSketchAndProject(block_size=block_size, **common),
        "AcceleratedSketchAndProject, rank / 4": AcceleratedSketchAndProject(
            block_size=block_size, rank=max(block_size // 4, 1), **common
        ),
    }


#: What `python -m benchmarks solvers` runs by default, in order.
NAMES = tuple(_solvers(0.01, 1.0, 1))


def epochs(*, on: str, solver: str, rows: int, tolerance: float, max_epochs: float, block_size: int) -> Outcome:
    """One solver on one system."""
    operator, rhs = system(on, rows)
    solution = _solvers(tolerance, max_epochs, block_size)[solver].solve(operator, rhs)
    stats = solution.stats
    return {
        "status": solution.status.name,
        "epochs": stats.epochs,
        "overhead": stats.overhead,
        "residual": stats.residual_norms["targets"],
        "seconds": stats.seconds,
    }


def shown(outcome: Outcome) -> str:
    """A cell of the table: epochs and overhead, or the residual that was left."""
    if outcome["status"] != "CONVERGED":
        return f"residual {outcome['residual']:.2g}"
    return f"{outcome['epochs']:.0f} + {outcome['overhead']:.1f}"


@app.command()
def solvers(
    rows: int = 3000,
    tolerance: float = 0.01,
    max_epochs: float = 300,
    block_size: int = 250,
    only: Annotated[list[str] | None, names_of(NAMES, "Solvers, by name; all by default.")] = None,
) -> None:
    """Epochs to tolerance of every solver and preconditioner, on five kernel systems; some minutes."""
    options = {"rows": rows, "tolerance": tolerance, "max_epochs": max_epochs, "block_size": block_size}
    outcomes: dict[str, dict[str, Outcome]] = {}
    for name in only or NAMES:
        outcomes[name] = {on: epochs(on=on, solver=name, **options) for on in SYSTEMS}
        console.print(name, *map(shown, outcomes[name].values()), sep=" | ")
    show(
        f"{rows} rows, 16 columns to {tolerance:g}, blocks of {block_size}; epochs + overhead",
        ["solver", *SYSTEMS],
        [[name, *map(shown, found.values())] for name, found in outcomes.items()],
    )
    finish("solvers", options, torch.get_num_threads(), outcomes=outcomes)

"""What the choice of probe vectors does to the gradient: root mean square error of half the trace, by probe distribution.

The gradient of the log marginal likelihood is `1/2 a^T dH a - 1/2 tr(H^-1 dH)`; only the trace is estimated. Here every
solve is exact (Cholesky, float64), so that the error is that of the probes alone.
"""

from functools import partial

import numpy as np
import pandas as pd
import torch
from gpytorch import kernels
from torch import Tensor

from benchmarks.command_line import app, console, finish, show
from benchmarks.datasets import load
from gpy_iterative.exact.probes import (
    ExactPrior,
    Gaussian,
    Preconditioned,
    ProbeDistribution,
    Rademacher,
    RandomFeatures,
)
from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.preconditioners import LowRankPlusVecchia, Vecchia
from gpy_iterative.solvers import Cholesky
from gpy_iterative.training.surrogate import surrogate

#: Row of the table -> distribution of a number of probes.
DISTRIBUTIONS = {
    "exact prior": ExactPrior,
    "features 250, corrected": partial(RandomFeatures, num_frequencies=250),
    "features 1000, corrected": partial(RandomFeatures, num_frequencies=1000),
    "features 1000, as published": partial(RandomFeatures, num_frequencies=1000, corrected=False),
    "features 4000, as published": partial(RandomFeatures, num_frequencies=4000, corrected=False),
    "Gaussian": Gaussian,
    "Rademacher": Rademacher,
    "pivoted Cholesky 100": partial(Preconditioned, correct_diagonal=False),
    "pivoted Cholesky 100, diagonal corrected": Preconditioned,
    "Vecchia 30": partial(Preconditioned, recipe=Vecchia(30)),
    "low rank plus Vecchia": partial(Preconditioned, recipe=LowRankPlusVecchia()),
}
#: The log-parameters of the table; lengthscales of the first two inputs stand for all.
ENTRIES = ("lengthscale 1", "lengthscale 2", "outputscale", "noise scale")
WORST = "worst / exact prior"
GRADIENT = "the gradient itself"

#: Data set, noise scale and lengthscale (of all inputs) of each table.
SETTINGS = (
    ("elevators", 0.1, 1.0),
    ("elevators", 0.1, 2.0),
    ("elevators", 0.35, 2.0),
    ("elevators", 0.1, 4.0),
    ("protein", 0.1, 1.0),
    ("protein", 0.35, 1.0),
)


class TraceProblem:
    """A Matern-3/2 system and its derivatives with respect to the logarithms of its hyperparameters.

    Args:
        x, targets: [n, d] and [n], float64.
        sigma: noise scale.
        lengthscale: of all inputs. The outputscale is 1.
    """

    def __init__(self, x: Tensor, targets: Tensor, sigma: float, lengthscale: float) -> None:
        self.targets = targets
        num_inputs = x.shape[-1]
        values = torch.tensor([lengthscale] * num_inputs + [1.0, sigma], dtype=torch.float64)
        self._logarithms = values.log().requires_grad_()
        lengthscales, (outputscale, noise_scale) = self._logarithms[:-2].exp(), self._logarithms[-2:].exp()
        kernel = RadialKernelLinearOperator(x / lengthscales, outputscale, function=MATERN32)
        self.operator = NoisyLinearOperator(kernel, noise_scale.square().expand(len(x)))
        matern = kernels.MaternKernel(nu=1.5, ard_num_dims=num_inputs).to(x)
        matern.lengthscale = lengthscale
        self.terms = [KernelTerm(matern, x)]
        self.factor = Cholesky().factorize(self.operator)

    def derivative(self, left: Tensor, right: Tensor) -> np.ndarray:
        """sum_k left_k^T dH right_k for each of ENTRIES, for [n, k] vectors."""
        zero = left.new_zeros(())
        value = surrogate(self.operator, zero, left, right)
        (result,) = torch.autograd.grad(value, self._logarithms, retain_graph=True)
        return result[[0, 1, -2, -1]].numpy()

    def half_trace(self) -> np.ndarray:
        """Exactly."""
        identity = torch.eye(len(self.targets), dtype=torch.float64)
        return self.derivative(0.5 * self.factor.inverse(), identity)

    def gradient(self) -> np.ndarray:
        """Of the log marginal likelihood, exactly."""
        weights = self.factor.solve(self.targets.unsqueeze(-1))
        return self.derivative(0.5 * weights, weights) - self.half_trace()

    @torch.no_grad()
    def estimate_factors(self, distribution: ProbeDistribution, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """H^-1 xi / (2 s) and S^-1 xi for a fresh draw."""
        draws = distribution.draw(self.operator, self.terms, generator)
        probes = distribution.probes(self.operator, self.terms, draws)
        solutions = self.factor.solve(probes.vectors)
        dual = solutions if probes.dual is None else probes.dual
        return solutions / (2 * distribution.num_probes), dual


def error_table(
    dataset: str, rows: int, sigma: float, num_probes: int, repeats: int, seed: int, lengthscale: float = 2.0
) -> pd.DataFrame:
    """Root mean square error of half the trace over fresh draws.

    Returns:
        A row a distribution (and one for the gradient's own entries), a column an entry of ENTRIES, and how many times
        the error of exact prior samples the worst entry is. Each error is known to about 1 / sqrt(2 repeats) of itself.
    """
    data = load(dataset, rows=rows, dtype=torch.float64)
    problem = TraceProblem(data.train_x, data.train_y, sigma, lengthscale)
    truth = problem.half_trace()
    table: dict[str, list[float]] = {GRADIENT: [*problem.gradient(), np.nan]}
    exact: np.ndarray | None = None
    for name, make in DISTRIBUTIONS.items():
        distribution = make(num_probes=num_probes)
        generator = torch.Generator().manual_seed(seed)
        estimates = [problem.derivative(*problem.estimate_factors(distribution, generator)) for _ in range(repeats)]
        error = np.sqrt(np.square(np.stack(estimates) - truth).mean(0))
        exact = error if exact is None else exact
        table[name] = [*error, (error / exact).max()]
    return pd.DataFrame.from_dict(table, orient="index", columns=[*ENTRIES, WORST])


@app.command(name="gradient-quality")
def gradient_quality(rows: int = 1500, num_probes: int = 64, repeats: int = 40, seed: int = 0) -> None:
    """The gradient's error by probe distribution, at every setting; about five minutes each on one core."""
    tables = {}
    for dataset, sigma, lengthscale in SETTINGS:
        title = f"{dataset}, noise scale {sigma}, lengthscales {lengthscale}"
        with console.status(title):
            frame = error_table(dataset, rows, sigma, num_probes, repeats, seed, lengthscale)
        show(
            f"{title}: {rows} rows, {num_probes} probes, {repeats} draws",
            ["probes", *map(str, frame.columns)],
            [
                [str(name), *("" if np.isnan(value) else f"{value:.2f}" for value in row)]
                for name, row in frame.iterrows()
            ],
        )
        tables[title] = frame.round(4).astype(object).where(frame.notna(), None).to_dict(orient="index")
    options = {"rows": rows, "num_probes": num_probes, "repeats": repeats, "seed": seed}
    finish("gradient_quality", options, torch.get_num_threads(), tables=tables)

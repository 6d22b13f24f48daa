"""Pictures of Laplace's method: what is left of the uncertainty as computation goes on, and quality over time."""

from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import app, console
from benchmarks.plots import plt, save_figure

#: Actions that are kept, in the three panels.
RANKS = (1, 3, 10)


class BinaryModel(gpi.models.IterativeLaplaceGP):
    """One latent function, RBF with lengthscale 1 and outputscale 5: the published figure's."""

    def __init__(self, x: Tensor, y: Tensor, **options: Any) -> None:
        super().__init__(x, y, gpi.likelihoods.LogitBernoulliLikelihood(), **options)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(x)
        self.covar_module.outputscale = 5.0
        self.covar_module.base_kernel.lengthscale = 1.0

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(x.new_zeros(len(x)), self.covar_module(x))


def binary_data() -> tuple[Tensor, Tensor]:
    """Fifty points on [-3, 5] with labels from a prior draw."""
    generator = torch.Generator().manual_seed(4)
    x = (8 * torch.rand(50, 1, generator=generator, dtype=torch.float64) - 3).sort(0).values
    kernel = 5 * torch.exp(-0.5 * (x - x.mT).square())
    kernel.diagonal().add_(1e-8)
    f = torch.linalg.cholesky(kernel) @ torch.randn(50, generator=generator, dtype=torch.float64)
    return x, (torch.rand(50, generator=generator, dtype=torch.float64) < torch.sigmoid(f)).double()


def uncertainty(path: Path) -> Path:
    """Mean, mathematical and computational uncertainty with 1, 3 and 10 actions."""
    x, y = binary_data()
    grid = torch.linspace(-4, 6, 200, dtype=torch.float64).unsqueeze(-1)
    figure, panels = plt.subplots(1, len(RANKS), figsize=(10, 3), sharey=True)
    for panel, rank in zip(panels, RANKS, strict=True):
        # One Newton step after the other would mix two effects: the mode is known, and actions are counted.
        weights = gpi.solvers.LaplaceCholesky().solve(*_problem(x, y)).value
        solver = gpi.solvers.LaplaceNewton(max_inner=rank, num_covariance_actions=0)
        model = BinaryModel(x, y, solver=solver).eval()
        posterior = model.posterior(initial_weights=weights)
        split = posterior.split_variance(grid)
        mean = posterior(grid).mean
        inner, outer = (2 * part.sqrt() for part in (split.mathematical, split.total))
        flat = grid.squeeze(-1)
        panel.fill_between(flat, mean - outer, mean + outer, color="#7fc97f", alpha=0.5, label="computational")
        panel.fill_between(flat, mean - inner, mean + inner, color="#386cb0", alpha=0.5, label="mathematical")
        panel.plot(flat, mean, color="black", label="mean")
        panel.plot(x.squeeze(-1), 6 * (2 * y - 1), "|", color="black")
        panel.set_title(f"{rank} action{'s' * (rank > 1)}")
    panels[0].set_ylabel("latent function")
    panels[0].legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    return save_figure(figure, path)


def _problem(x: Tensor, y: Tensor) -> tuple[Any, Any]:
    model = BinaryModel(x, y)
    prior = gpi.linear_operators.latent_prior(model(x), gpi.linear_operators.KernelProducts())
    return prior, gpi.likelihoods.PointwiseLikelihood(model.likelihood, y, 1)


def over_time(outcomes: dict[str, Any], path: Path) -> Path:
    """Accuracy and NLL of all contenders over seconds."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.5))
    for panel, figure_of_merit in zip(panels, ("accuracy", "nll"), strict=True):
        for name, outcome in outcomes.items():
            for kind in dict.fromkeys(point["kind"] for point in outcome["curve"]):
                points = [point for point in outcome["curve"] if point["kind"] == kind]
                seconds = [point["seconds"] for point in points]
                values = [point[figure_of_merit] for point in points]
                panel.plot(seconds, values, "o-", markersize=3, label=f"{name}, {kind}")
        panel.set_xlabel("seconds")
        panel.set_ylabel({"accuracy": "accuracy", "nll": "NLL"}[figure_of_merit])
    panels[1].set_yscale("log")
    panels[1].legend(fontsize=6)
    figure.tight_layout()
    return save_figure(figure, path)


def run(folder: Path) -> list[Path]:
    """All that need no long run."""
    return [uncertainty(folder / "laplace_uncertainty.svg")]


@app.command(name="laplace-pictures")
def laplace_pictures(folder: Path = Path("docs/pictures")) -> None:
    """The pictures of the documentation's page on Laplace's method."""
    for path in run(folder):
        console.print(f"saved {path}")

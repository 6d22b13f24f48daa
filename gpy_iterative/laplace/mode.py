"""The mode at the training data, and its refinements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import Tensor

from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood
from gpy_iterative.laplace.newton.base import LaplaceSolution
from gpy_iterative.linear_operators.latent import LatentPrior, num_latents
from gpy_iterative.linear_solvers.solution import SolveStats, SolveStatus
from gpy_iterative.training.report import Report
from gpy_iterative.training.snapshot import ModelSnapshot


@dataclass(frozen=True)
class ModeReport(Report):
    """The search for a mode; `status`, `stationarity` and `rank` are of the last refinement."""

    status: SolveStatus
    iterations: int
    epochs: float
    num_refinements: int
    stationarity: float
    rank: int
    seconds: float


@dataclass(frozen=True)
class LaplaceFit:
    """Observed data and their mode or last refinement."""

    snapshot: ModelSnapshot
    inputs: list[Tensor]
    prior: LatentPrior
    likelihood: PointwiseLikelihood
    distribution: MultivariateNormal
    is_single: bool  # predictions have no latent dimension
    solution: LaplaceSolution
    mode_weights: Tensor  # v of the mode
    stats: tuple[SolveStats, ...]  # of mode and refinements

    @property
    def report(self) -> ModeReport:
        return ModeReport(
            status=self.solution.status,
            iterations=sum(stats.iterations for stats in self.stats),
            epochs=sum(stats.epochs for stats in self.stats),
            num_refinements=len(self.stats) - 1,
            stationarity=self.solution.stationarity,
            rank=self.solution.inverse.rank,
            seconds=sum(stats.seconds for stats in self.stats),
        )

    def columns(self) -> Tensor:
        """[v, Q] [n C, 1 + B], in the kernel's dtype."""
        return torch.cat([self.solution.value.view(-1, 1), self.solution.inverse.root], dim=-1).to(
            self.prior.mean.dtype
        )


def observed_data(targets: Tensor, params: Sequence[Any]) -> tuple[Tensor | None, Tensor, tuple[Any, ...]]:
    """Which points have targets, [n] bool (None: all), their targets and arguments."""
    policy = gpytorch.settings.observation_nan_policy.value()
    if policy == "fill":
        raise ValueError("observation_nan_policy('fill') has no meaning here; use 'mask', which drops the points.")
    if policy == "ignore" or not targets.is_floating_point():
        return None, targets, tuple(params)
    missing = torch.isnan(targets.unsqueeze(-1)).flatten(1)
    observed = ~missing.any(-1)
    partial = missing.any(-1) & ~missing.all(-1)
    if partial.any():
        raise ValueError(
            f"Row {int(partial.nonzero()[0])} of the targets is missing in part, and Laplace's method drops whole rows: "
            "make all of it NaN, or for a Gaussian likelihood take HutchinsonMarginalLogLikelihood, which drops values."
        )
    if observed.all():
        return None, targets, tuple(params)
    has_rows = lambda value: isinstance(value, Tensor) and value.shape[:1] == observed.shape
    return observed, targets[observed], tuple(value[observed] if has_rows(value) else value for value in params)


def check_targets_fit(distribution: MultivariateNormal, targets: Tensor) -> None:
    points = distribution.mean.numel() // num_latents(distribution)
    if not isinstance(targets, Tensor):
        raise ValueError(f"The targets must be a tensor, got {type(targets).__name__}: use torch.as_tensor(...).")
    if targets.shape[:1] != (points,) or targets.dim() > 2:
        raise ValueError(f"Laplace's method needs targets [{points}], one for each point; got {tuple(targets.shape)}.")
    if targets.dim() == 2 and not isinstance(distribution, MultitaskMultivariateNormal):
        several = (
            "Classes are whole numbers, such as targets.argmax(-1). Several functions are "
            "MultitaskMultivariateNormal.from_batch_mvn(prior); batches need a model each."
        )
        hint = "Use targets.squeeze(-1)." if targets.shape[-1] == 1 else several
        raise ValueError(f"The targets must be [n], got {tuple(targets.shape)}. {hint}")
    if targets.device != distribution.mean.device:
        raise ValueError(
            f"The targets are on {targets.device}, the model's output on {distribution.mean.device}: move one of them."
        )

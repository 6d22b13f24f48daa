"""The log density of one system from truncated conjugate gradient series.

Potapczynski et al. 2021 (see `truncation.py`), section 4.1, appendix C. With M estimates ys_a of H^-1 (y - mean) from one
run, and xs_i of H^-1 z_i for s probes of covariance P, the gradient is

    1/2 mean_{a != b} ys_a^T dH ys_b - 1/(2s) sum_i xs_i^T dH P^-1 z_i + (mean_a ys_a)^T dmean.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.exact.estimates import DensityEstimate
from gpy_iterative.exact.probes import Probes
from gpy_iterative.linear_solvers.logdet.krylov_logarithm import krylov_logarithm_terms
from gpy_iterative.linear_solvers.solution import SolveStats, SolveStatus
from gpy_iterative.randomized.solver_series import Series, conjugate_gradient_series
from gpy_iterative.randomized.truncation import Truncation, decay_rate
from gpy_iterative.training.report import Report
from gpy_iterative.training.run import Part
from gpy_iterative.worker_threads import CPU


@dataclass(frozen=True)
class TruncationReport(Report):
    """Draws, steps and variance of a truncated series.

    Attributes:
        truncation: distribution of the draws.
        target_steps: J of the targets, [*b, M].
        probe_steps: J of each probe, [*b, s].
        steps: of targets and probes, [*b, 1 + s].
        converged: series that ended by themselves, [*b, 1 + s].
        relative_variance: E|x - E x|^2 / |E x|^2 in the norm of H for one estimate x of the targets, [*b].
        decay_rate: log(rho) of the targets' terms, which fall as rho^-j, [*b].
    """

    truncation: Truncation
    target_steps: Tensor
    probe_steps: Tensor
    steps: Tensor
    converged: Tensor
    relative_variance: Tensor
    decay_rate: Tensor


class Member:
    """One system of a batch."""

    def __init__(
        self, index: tuple[int, ...], operator: LinearOperator, residual: Tensor, probes: Probes, draws: Part
    ) -> None:
        covariance = probes.covariance  # S; None for the identity
        if index:
            operator = cast(LinearOperator, operator[index])
            covariance = None if covariance is None else covariance[index]
        self.operator, self.residual, self.covariance = operator, residual[index], covariance
        self.vectors, self.dual = probes.vectors[index], cast(Tensor, probes.dual)[index]  # xi and S^-1 xi, [n, s]
        self.target_stops = draws["target_stops"][index].cpu()  # [M]
        self.probe_stops = draws["probe_stops"][index].cpu()  # [s]

    def run(self, log_survival: Tensor) -> Series:
        own = torch.zeros(len(self.target_stops), dtype=torch.long, device=CPU)
        return conjugate_gradient_series(
            self.operator,
            torch.cat([self.residual.unsqueeze(-1), self.vectors], dim=-1),
            torch.cat([own, torch.arange(1, len(self.probe_stops) + 1, device=CPU)]),
            torch.cat([self.target_stops, self.probe_stops]),
            log_survival,
            preconditioner=self.covariance,
        )

    def estimate(self, series: Series, truncation: Truncation, log_survival: Tensor) -> DensityEstimate:
        targets, solved = series.sums.tensor_split([len(self.target_stops)], dim=-1)
        left, right = _quadratic_factors(targets)
        value, variance = self._value(series, log_survival)
        energies = series.energies[:, 0]
        excess, total = (-log_survival).expm1() @ energies, energies.sum()
        return DensityEstimate(
            value=value.to(self.residual),
            value_sem=variance.sqrt().to(self.residual),
            weights=targets.mean(-1),
            left=torch.cat([left, solved / (-2 * len(self.probe_stops))], dim=-1),
            right=torch.cat([right, self.dual], dim=-1),
            status=series.status,
            stats=SolveStats(
                iterations=series.iterations,
                epochs=float(series.iterations),
                overhead=0.0 if self.covariance is None else self.covariance.build_epochs,
                residual_norms={"targets": float(series.norms[0]), "probes": float(series.norms[1:].amax())},
                seconds=series.seconds,
            ),
            truncation=TruncationReport(
                truncation=truncation,
                target_steps=self.target_stops,
                probe_steps=self.probe_stops,
                steps=series.steps,
                converged=series.converged,
                relative_variance=excess / total if total > 0 else torch.zeros_like(total),
                decay_rate=torch.tensor(decay_rate(energies), device=CPU),
            ),
        )

    def _value(self, series: Series, log_survival: Tensor) -> tuple[Tensor, Tensor]:
        weights = (-log_survival).exp()
        steps = torch.arange(1, series.iterations + 1, device=CPU).unsqueeze(-1)
        energies = series.energies[:, 0]
        quadratic = (weights * energies) @ (steps <= self.target_stops).double()
        terms = krylov_logarithm_terms(series.lengths[:, 1:], series.products[:, 1:])
        logarithms = weights @ (terms * (steps <= self.probe_stops))
        logarithms = logarithms * (self.vectors.double() * self.dual.double()).sum(0).cpu()
        base = 0.0 if self.covariance is None else float(self.covariance.logdet())
        constant = len(self.residual) * math.log(2 * math.pi)
        value = -0.5 * (quadratic.mean() + base + logarithms.mean() + constant)
        # q = sum_{j <= J} e_j / S_j has E[q^2] = sum_ij e_i e_j / S_min(i, j).
        after = energies.flip(0).cumsum(0).flip(0) - energies
        of_quadratic = ((weights - 1) * energies * (energies + 2 * after)).sum() / len(self.target_stops)
        count = logarithms.numel()
        of_logarithms = logarithms.var() / count if count > 1 else torch.full_like(value, math.nan)
        return value, 0.25 * (of_quadratic + of_logarithms)


def stacked_members(members: list[DensityEstimate], batch: torch.Size) -> DensityEstimate:
    def stacked(items: list[Any]) -> dict[str, Tensor]:
        names = [name for name, value in vars(items[0]).items() if isinstance(value, Tensor)]
        tensors = {name: torch.stack([getattr(item, name) for item in items]) for name in names}
        return {name: tensor.reshape((*batch, *tensor.shape[1:])) for name, tensor in tensors.items()}

    reports = [member.truncation for member in members]
    return dataclasses.replace(
        members[0],
        **stacked(members),
        status=max((member.status for member in members), key=list(SolveStatus).index),
        stats=SolveStats.of_batch([member.stats for member in members]),
        truncation=dataclasses.replace(reports[0], **stacked(reports)),
    )


def _quadratic_factors(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Factors [n, M - 1] of 1/2 mean_{a != b} ys_a^T dH ys_b, as dH is symmetric; biased for M = 1."""
    count = targets.shape[-1]
    if count == 1:
        return 0.5 * targets, targets
    return targets[:, 1:] / (count * (count - 1)), targets.cumsum(-1)[:, :-1]


def pooled_energies(runs: list[Series]) -> Tensor:
    """Relative energies of the targets [J], added over the batch."""
    pooled = torch.zeros(max(series.iterations for series in runs), dtype=torch.float64, device=CPU)
    for series in runs:
        energies = series.energies[:, 0]
        pooled[: len(energies)] += energies / energies.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return pooled[: max(1, int((pooled > 0).sum()))]

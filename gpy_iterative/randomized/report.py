"""Figures of a step that truncates at random: terms of a series, or random features."""

from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.randomized.truncation import Truncation
from gpy_iterative.training.report import Report


@dataclass(frozen=True)
class TruncationReport(Report):
    """A truncated conjugate gradient series: what was drawn, what was run, and the variance that this leaves.

    Attributes:
        truncation: the distribution of the draws.
        target_steps: J of each truncation of the targets' series, [*b, M].
        probe_steps: J of each probe, [*b, s].
        steps: that were run, of the targets and of each probe, [*b, 1 + s].
        converged: which of these series ended before they were cut, [*b, 1 + s].
        relative_variance: of one truncation of H^-1 (y - mean), E|x - E x|^2 over |E x|^2 in the norm of H, [*b]: from
            the terms that were run.
        decay_rate: log(rho) of the targets' series, whose terms fall as rho^-j, [*b]. The variance stays finite for a
            truncation of a rate below 2 log(rho); log(rho) itself is best.
    """

    truncation: Truncation
    target_steps: Tensor
    probe_steps: Tensor
    steps: Tensor
    converged: Tensor
    relative_variance: Tensor
    decay_rate: Tensor

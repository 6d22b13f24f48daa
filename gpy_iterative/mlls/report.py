"""What the last evaluation of a marginal log likelihood did, and how far its numbers can be trusted."""

from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.solvers import SolveStatus


@dataclass(frozen=True)
class MarginalLogLikelihoodReport:
    """One step's figures; `print(mll.report)` shows them on one line.

    Attributes:
        status: how the solve ended.
        iterations: solver iterations.
        epochs: passes over the kernel matrix that the solve took (0 for Cholesky).
        residual_targets: relative residual norm of `H a = y - mean`, from a true residual.
        residual_probes: the same of the probes' solves (their largest, or their mean under `stopping="mean"`);
            None where there are no probes (Cholesky).
        value: [*b], what `forward` returned: the log marginal likelihood with priors and added loss terms,
            divided by the number of data.
        value_sem: [*b], standard error of `value`, estimated from the log-determinant's four probes (0 for Cholesky):
            it is itself uncertain, and errors of twice as much are no surprise.
        seconds: wall-clock time of the forward pass.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    residual_targets: float
    residual_probes: float | None
    value: Tensor
    value_sem: Tensor
    seconds: float

    def __str__(self) -> str:
        value, sem = self.value.mean().item(), self.value_sem.mean().item()
        probes = "" if self.residual_probes is None else f", probes {self.residual_probes:.2g}"
        return (
            f"mll {value:.4f} ± {sem:.1g}; {self.status.name.lower()} after {self.epochs:.1f} epochs; "
            f"residuals: targets {self.residual_targets:.2g}{probes}; {self.seconds:.2f} s"
        )

"""Reports."""

from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.report import Report


@dataclass(frozen=True)
class LaplaceReport(Report):
    """One training step of a LaplaceMarginalLogLikelihood.

    Attributes:
        status: of the mode, the worst solve, or the bound.
        iterations: Newton steps.
        epochs, probe_epochs: kernel products for the mode and for the gradient.
        stationarity: see `LaplaceSolution`.
        rank: number of actions.
        value, value_sem: result of `forward`, and its standard error from probes, [].
        far_field_error: as in `MarginalLogLikelihoodReport`, without exact rows.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    probe_epochs: float
    stationarity: float
    rank: int
    value: Tensor
    value_sem: Tensor
    seconds: float
    far_field_error: float | None = None

    def __str__(self) -> str:
        far = "" if self.far_field_error is None else f"; far field to {self.far_field_error:.1g}"
        return (
            f"mll {self.value.item():.4f} ± {self.value_sem.item():.1g}; {self.status.name.lower()} after "
            f"{self.iterations} Newton steps, {self.epochs:.0f} kernel products and {self.probe_epochs:.0f} with probes; "
            f"relative gradient {self.stationarity:.1g}{far}; {self.seconds:.2f} s"
        )


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

"""Figures of one step of `LaplaceMarginalLogLikelihood`, and of one posterior."""

from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.report import Report


@dataclass(frozen=True)
class LaplaceReport(Report):
    """One step's figures of a LaplaceMarginalLogLikelihood, on one line or as a table.

    Attributes:
        status: of the mode, or of the worst solve; of objective="elbo" that of the bound's maximisation.
        iterations: Newton steps.
        epochs: kernel products to the mode.
        probe_epochs: products with all probes, and with the adjoint, for the gradient.
        stationarity: of the mode: the log joint density's gradient over the likelihood's.
        rank: actions that were kept.
        value: [], what `forward` returned.
        value_sem: [], its standard error from the log-determinant's probes (0 where there are none).
        seconds: wall-clock time of the forward pass.
        far_field_error: where products passed through far fields, their measured relative error; else None. The mode is
            that of the compressed prior: no exact rows are compared.
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
    """The search for a posterior's mode, with its refinements: figures of all solves together.

    `status`, `stationarity` (the log joint density's gradient over the likelihood's) and `rank` (actions that were kept)
    are of the last refinement; `iterations` are Newton steps, `epochs` kernel products.
    """

    status: SolveStatus
    iterations: int
    epochs: float
    num_refinements: int
    stationarity: float
    rank: int
    seconds: float

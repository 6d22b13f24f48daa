"""Figures of one step of `QuadruplyStochasticELBO`."""

from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.training.report import Report


@dataclass(frozen=True)
class QuadruplyStochasticReport(Report):
    """One step on a sample of data and features; `print(mll.report)` shows it on one line.

    Attributes:
        value: what `forward` returned, [].
        is_unbiased: whether it estimates the evidence lower bound for the rows, or bounds it from below.
        num_rows: sampled data.
        num_features: m.
        num_feature_samples: features of an index set, beyond those that every step evaluates.
        num_control_points: support points of the control variate.
        num_steps_per_batch: for which the data are kept; 1 where each step draws others.
        seconds: wall-clock time of the forward pass.
    """

    value: Tensor
    is_unbiased: bool
    num_rows: int
    num_features: int
    num_feature_samples: int
    num_control_points: int
    num_steps_per_batch: int
    seconds: float

    def __str__(self) -> str:
        kind = "elbo" if self.is_unbiased else "bound"
        return (
            f"{kind} {self.value.item():.4f} from {self.num_rows} rows and {self.num_feature_samples} of "
            f"{self.num_features} features; {self.seconds:.2f} s"
        )

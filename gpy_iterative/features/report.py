"""Figures of one mini-batch step."""

from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.training.report import Report


@dataclass(frozen=True)
class MinibatchReport(Report):
    """One mini-batch step's figures; `print(mll.report)` shows them on one line, `print(mll.report.table())` as a table.

    Attributes:
        value: what `forward` returned, a scalar.
        batch_size: rows that were looked at.
        num_data: n.
        steps: training steps so far.
        seconds: wall-clock time of the forward pass.
    """

    value: Tensor
    batch_size: int
    num_data: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"mll {self.value.item():.4f} from {self.batch_size} of {self.num_data} data; step {self.steps}; "
            f"{self.seconds:.3f} s"
        )

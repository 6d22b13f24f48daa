"""Training to the optimum: average information steps, stopping rule, report.

Begin with `fit.py`, then `loops.py`; `steps/` makes one step. It may import `exact/` and its imports.
"""

from gpy_iterative.fitting.result import Estimated, FitResult, HistoryRow
from gpy_iterative.fitting.steps.average_information import AverageInformation
from gpy_iterative.fitting.steps.points import Assessment, Point, Step
from gpy_iterative.fitting.stopping import FitStatus

__all__ = [
    "Assessment",
    "AverageInformation",
    "Estimated",
    "FitResult",
    "FitStatus",
    "HistoryRow",
    "Point",
    "Step",
]

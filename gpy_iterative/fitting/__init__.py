"""Training to the optimum: steps by average information, a rule that stops them, and a report of the result.

Begin with `fit.py`, then `loops.py`; `average_information.py` is one step, `curvature.py` the matrix that it solves
with. It may import `exact/` and what that may import.
"""

from gpy_iterative.fitting.average_information import AverageInformation
from gpy_iterative.fitting.points import Assessment, Point, Step
from gpy_iterative.fitting.result import Estimated, FitResult, HistoryRow
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

"""The start of a solve: the last solution, or the extrapolation 2 V_t - V_{t-1} of the last two.

Lin et al. 2024, section 4. The solutions are a part of the run: "latest" and, where they extrapolate, "before".
"""

from typing import Literal, get_args

from torch import Tensor

from gpy_iterative.training.run import Part

WarmStart = Literal["extrapolated", "previous", False]


def check_warm_start(mode: WarmStart) -> None:
    """Raises ValueError for any other mode."""
    if not (mode is False or (isinstance(mode, str) and mode in get_args(WarmStart))):  # 0 == False
        raise ValueError(f"warm_start must be 'extrapolated', 'previous' or False, got {mode!r}.")


def initial_guess(mode: WarmStart, part: Part | None) -> Tensor | None:
    """Where the next solve of the same system starts, [*b, n, s]; None is zero."""
    if mode is False or part is None:
        return None
    if mode == "extrapolated" and "before" in part:
        return 2 * part["latest"] - part["before"]
    return part["latest"]


def updated(mode: WarmStart, part: Part | None, solutions: Tensor) -> Part:
    """The part after a solve with these solutions [*b, n, s], which the caller leaves unchanged."""
    if mode == "extrapolated" and part is not None:
        return {"latest": solutions, "before": part["latest"]}
    return {"latest": solutions}

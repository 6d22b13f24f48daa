"""Where a solve starts: at the last solution, or at what the last two point to.

Lin et al. 2024, section 4; the extrapolated start is 2 V_t - V_{t-1}, right for the smooth paths that Adam takes.
"""

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

Mode = Literal["extrapolated", "previous", False]


class WarmStart:
    """Keeps the last two solutions of a sequence of solves.

    Args:
        mode: "extrapolated", "previous", or False for a cold start at zero.

    Raises:
        ValueError: any other mode.
    """

    def __init__(self, mode: Mode) -> None:
        if not (mode is False or (isinstance(mode, str) and mode in get_args(Mode))):  # 0 == False
            raise ValueError(f"warm_start must be 'extrapolated', 'previous' or False, got {mode!r}.")
        self.mode: Mode = mode
        self._latest: Tensor | None = None
        self._before: Tensor | None = None

    def initial_guess(self, like: Tensor, columns: int) -> Tensor | None:
        """[*b, n, columns] to start from; None where nothing fits `like` [*b, n] in shape, dtype and device."""
        latest = self._latest
        if self.mode is False or latest is None or not _fits(latest, like, columns):
            return None
        if self.mode == "extrapolated" and self._before is not None and self._before.shape == latest.shape:
            return 2 * latest - self._before
        return latest

    @property
    def latest(self) -> Tensor | None:
        """The last solution, [*b, n, s]."""
        return self._latest

    def update(self, solutions: Tensor) -> None:
        """Takes the solutions of one solve, [*b, n, s]; the caller leaves them unchanged."""
        same = self._latest is not None and self._latest.shape == solutions.shape
        self._before = self._latest if same and self.mode == "extrapolated" else None
        self._latest = solutions

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves or converts the solutions."""
        self._latest = None if self._latest is None else function(self._latest)
        self._before = None if self._before is None else function(self._before)

    def tensors(self) -> dict[str, Tensor]:
        """What `load_tensors` takes."""
        named = {"latest": self._latest, "before": self._before}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self._latest, self._before = tensors.get("latest"), tensors.get("before")


def _fits(solutions: Tensor, like: Tensor, columns: int) -> bool:
    return (
        solutions.shape == (*like.shape, columns) and solutions.dtype == like.dtype and solutions.device == like.device
    )

"""Progress of long operations."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from gpy_iterative.linear_solvers.solution import SolveProgress


@dataclass(frozen=True)
class ProgressReport:
    """Progress of a long operation.

    Attributes:
        operation: "solve", "mode", "refinement", "variances", "pass", "subsets" or "fit".
        done: finished units.
        unit: such as "epochs".
        total: None if unknown.
        figures: such as relative residuals of a solve by group.
    """

    operation: str
    done: float
    unit: str
    total: float | None
    figures: dict[str, float]


Progress = bool | Callable[[ProgressReport], None]


def check_progress(progress: Any) -> None:
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress must be True, False or a callable that takes a ProgressReport, got {progress!r}.")


@contextmanager
def reporting(
    progress: Progress, operation: str, unit: str, total: float | None = None
) -> Iterator[Callable[[float, dict[str, float]], None]]:
    if progress is False:
        yield lambda done, figures: None
    elif progress is True:
        of = "" if total is None else f" of {total:g}"
        layout = f"{{desc}}: {{n:.4g}}{of} {unit} [{{elapsed}}] {{postfix}}"
        hidden = sys.stderr is None  # as under pythonw
        with tqdm(desc=operation, total=total, bar_format=layout, leave=False, disable=hidden) as bar:

            def tell(done: float, figures: dict[str, float]) -> None:
                bar.set_postfix({name: f"{figure:.2g}" for name, figure in figures.items()}, refresh=False)
                bar.update(done - bar.n)

            yield tell
    else:
        yield lambda done, figures: progress(ProgressReport(operation, done, unit, total, figures))


@contextmanager
def reporting_solve(
    progress: Progress, operation: str = "solve", unit: str = "epochs"
) -> Iterator[Callable[[SolveProgress], None] | None]:
    """Yields a solver's callback; None without progress."""
    if progress is False:
        yield None
        return
    with reporting(progress, operation, unit) as tell:
        yield lambda told: tell(told.epochs, told.residual_norms)

"""Progress of long operations, as `progress=` reports it."""

from gpy_iterative.training.progress import Progress, ProgressReport

__all__ = ["Progress", "ProgressReport"]

"""Progress of long operations."""

from gpy_iterative.training.progress import Progress, ProgressReport

__all__ = ["Progress", "ProgressReport"]

"""Pictures: matplotlib without a screen, and files that are the same whenever the numbers are."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("Agg")
from matplotlib import pyplot as plt

mpl.rcParams["svg.hashsalt"] = "gpy_iterative"


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes and closes; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return path


__all__ = ["plt", "save_figure"]

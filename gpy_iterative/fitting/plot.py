import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpy_iterative.fitting.result import HistoryRow


def new_figure(caller: str, size: tuple[float, float]) -> Any:
    """An empty `matplotlib.figure.Figure`. ImportError, with the caller's name, without matplotlib."""
    try:
        # Optional, and slow to import.
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(f"{caller} needs matplotlib, which is not installed: pip install matplotlib.") from error
    return figures.Figure(figsize=size, layout="constrained")


def plot_history(rows: "Sequence[HistoryRow]") -> Any:
    steps = [row.step for row in rows]
    has_left = any(row.left_to_gain is not None for row in rows)
    figure = new_figure("result.plot()", (6, 5 if has_left else 3))
    first, *others = figure.subplots(2 if has_left else 1, sharex=True, squeeze=False)[:, 0]
    first.errorbar(steps, [row.value for row in rows], [row.value_sem for row in rows], marker="o", capsize=3)
    first.set_ylabel("log marginal likelihood a datum")
    for axes in others:
        axes.semilogy(steps, [row.left_to_gain for row in rows], marker="o")
        axes.set_ylabel("left to gain (nats)")
    (others[-1] if others else first).set_xlabel("step")
    return figure

"""The picture of the start page: seconds and quality against rows, from `spatial-fit`, and a posterior with samples."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import gpy_iterative as gpi
from benchmarks.cases.spatial_fit import CASE, FIT
from benchmarks.cases.spatial_rivals import RIVALS
from benchmarks.command_line import app, console
from benchmarks.datasets import Split
from benchmarks.models import MaternRegression
from benchmarks.page import DOCS
from benchmarks.plots import plt, save_figure
from benchmarks.runner import RESULTS, Outcome
from benchmarks.suite import NothingToShowError

LABELS = {FIT: "gpy_iterative"}
COLOURS = dict(zip([FIT, *RIVALS], ["#d62728", "#7f7f7f", "#9467bd", "#1f77b4", "#2ca02c"], strict=False))
PATHS = 6


def drawn(outcomes: Mapping[str, Mapping[str, Outcome]]) -> Figure:
    """Three panels: seconds of fit and predictions, log-likelihood of test rows, and functions that fit a time series."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for name, colour in COLOURS.items():
        found = {_rows(size): by_name[name] for size, by_name in outcomes.items() if "rmse" in by_name.get(name, {})}
        style = {
            "marker": "o",
            "ms": 4,
            "color": colour,
            "label": LABELS.get(name, name),
            "zorder": 3 if name == FIT else 2,
        }
        seconds = [outcome["seconds"] + outcome["seconds_prediction"] for outcome in found.values()]
        left.plot(list(found), seconds, **style)
        middle.plot(list(found), [outcome["log_likelihood"] for outcome in found.values()], **style)
    for panel, label in ((left, "seconds, fit and predictions"), (middle, "test log-likelihood a row")):
        panel.set(xscale="log", xlabel="rows", title=label)
    left.set_yscale("log")
    left.legend(fontsize=7)
    _posterior(right)
    return figure


def _rows(size: str) -> int:
    """Of "n=1000 d=2"."""
    return int(size.split()[0].removeprefix("n="))


def _posterior(panel: Axes) -> None:
    """Observations with two gaps, the predictive band, and sample paths."""
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(400, 1, generator=generator, dtype=torch.float64)
    x = x[((x < 3) | (x > 4.2)).squeeze(-1) & ((x < 7) | (x > 7.8)).squeeze(-1)]
    y = torch.sin(2 * x.squeeze(-1)) + 0.5 * torch.sin(5 * x.squeeze(-1))
    y = y + 0.2 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    grid = torch.linspace(0, 10, 500, dtype=torch.float64).unsqueeze(-1)
    model = MaternRegression(Split("series", x, y, grid, grid.squeeze(-1)))
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)
    gpi.fit(mll, progress=False)
    posterior = mll.posterior()
    with torch.no_grad():
        latent = posterior(grid)
        paths = posterior.sample_paths(PATHS)(grid)
    flat, mean, spread = grid.squeeze(-1), latent.mean, 2 * latent.stddev
    panel.fill_between(flat, mean - spread, mean + spread, color="#d62728", alpha=0.15, lw=0, label="95 % band")
    panel.plot(flat, paths.mT, color="#d62728", lw=0.5, alpha=0.7)
    panel.plot([], [], color="#d62728", lw=0.5, label="samples, as functions")
    panel.plot(x.squeeze(-1), y, ".", ms=2, color="0.3", label="observed")
    panel.set(title="posterior", ylim=(-2, 3))
    panel.legend(fontsize=7, loc="upper right")


@app.command()
def start_page(path: Path = DOCS / "pictures" / "start.svg", results: Path = RESULTS) -> None:
    """The picture of the start page, from the saved `spatial-fit` in the plane."""
    saved = results / f"{CASE}_2d.json"
    if not saved.exists():
        raise NothingToShowError(f"Nothing is saved in {saved}; python -m benchmarks spatial-fit measures it.")
    console.print(f"saved {save_figure(drawn(json.loads(saved.read_text())['outcomes']), path)}")

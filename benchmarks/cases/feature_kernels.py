"""Kernels with finitely many features, by the protocol of Shoham and Avron: their four methods, ours, and full batches.

A network of two layers of 128 (ReLU after both) under a linear kernel, m = 128, or under random Fourier features,
m = 1000. Inputs standardised; targets are standardised for training, and all figures are in the units of the centred
targets, the published ones': NLML per training datum (with log 2 pi) at the exact marginal likelihood, RMSE on the 10 %
held out.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gpytorch
import torch
import typer
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

import gpy_iterative as gpi
from benchmarks import published
from benchmarks.command_line import DEFAULT_THREADS, FirstRows, Threads, app, console, exit_if_missing, names_of
from benchmarks.datasets import Split, load
from benchmarks.plots import plt, save_figure
from benchmarks.runner import CONTENDERS, RESULTS, Outcome, contender
from benchmarks.runs import Measured, Run, SavedRuns
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from benchmarks.training import posterior_scores, take_step

WIDTH = 128
FREQUENCIES = 500


class DeepRegression(gpytorch.models.ExactGP):
    """Zero mean; the publication's network inside of the kernel.

    Args:
        data: standardised.
        kernel: "linear" or "fourier".
        seed: of the network's initial weights and the frequencies.
    """

    def __init__(self, data: Split, kernel: str, seed: int) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        super().__init__(data.train_x, data.train_y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        generator = torch.Generator().manual_seed(seed)
        network = torch.nn.Sequential(
            torch.nn.Linear(data.train_x.shape[-1], WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.ReLU(),
        )
        for layer in (network[0], network[2]):
            torch.nn.init.kaiming_uniform_(layer.weight, a=5**0.5, generator=generator)
            bound = layer.in_features**-0.5
            torch.nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        if kernel == "linear":
            base = gpytorch.kernels.LinearKernel()
            base.variance = 1.0
        else:
            fourier = gpytorch.kernels.RFFKernel(num_samples=FREQUENCIES, num_dims=WIDTH)
            fourier.randn_weights = torch.randn(WIDTH, FREQUENCIES, generator=generator)
            fourier.lengthscale = 1.0
            base = gpytorch.kernels.ScaleKernel(fourier)
        self.covar_module = gpi.kernels.DeepFeatureKernel(network, base)
        likelihood.noise = 0.1
        self.to(data.train_x)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


#: Of a model, the batch size, the number of steps to come, and a seed.
Make = Callable[[DeepRegression, int, int, int], MarginalLogLikelihood]


def _made(kind: Callable[..., MarginalLogLikelihood], **options: Any) -> Make:
    return lambda m, b, steps, seed: kind(m.likelihood, m, batch_size=b, generator=seed, **options)


def _falling(model: DeepRegression, batch_size: int, steps: int, seed: int) -> MarginalLogLikelihood:
    """The tracker's rate falls from .2 to .01."""
    make = _made(gpi.mlls.VariationalFeatureMarginalLogLikelihood, tracker_rate=lambda step: 0.2 - 0.19 * step / steps)
    return make(model, batch_size, steps, seed)


METHODS: dict[str, Make] = {
    "natural": _made(gpi.mlls.VariationalFeatureMarginalLogLikelihood),
    "natural .2": _made(gpi.mlls.VariationalFeatureMarginalLogLikelihood, tracker_rate=0.2),
    "natural falling": _falling,
    "gradient": _made(gpi.mlls.VariationalFeatureMarginalLogLikelihood, update="gradient"),
    "scgd": _made(gpi.mlls.CompositionalMarginalLogLikelihood),
    "minimax": _made(gpi.mlls.MinimaxMarginalLogLikelihood),
    "bsgd": _made(gpi.mlls.MinibatchMarginalLogLikelihood),
}


def train(
    data: Split,
    make: Make,
    *,
    kernel: str = "linear",
    batch_size: int = 128,
    epochs: int = 100,
    rate: float = 0.01,
    seed: int = 0,
    refresh_every: int = 1,
    evaluations: int = 10,
) -> Outcome:
    """Adam with a rate that falls linearly to 0; keeps the iterate of the smallest exact NLML, as the publication does."""
    model = DeepRegression(data, kernel, seed)
    steps_an_epoch = len(data.train_y) // batch_size
    steps = epochs * steps_an_epoch
    mll = make(model, batch_size, steps, seed)
    optimizer = torch.optim.Adam(mll.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    offset = float(torch.tensor(data.target_scale).log())
    curve: list[tuple[int, float]] = []
    best, best_state = float("inf"), model.state_dict()
    seconds = 0.0
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        with gpytorch.settings.debug(False):
            for _ in range(steps_an_epoch):
                take_step(model, mll, optimizer, data)
                scheduler.step()
        if refresh_every and epoch % refresh_every == 0:
            mll.refresh()
        seconds += time.perf_counter() - start
        if epoch % max(1, epochs // evaluations) == 0 or epoch == epochs:
            value = -float(mll.exact_value()) + offset
            curve.append((epoch, value))
            if value < best:
                best = value
                best_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(best_state)
    return {"nlml": best, "curve": curve, "seconds_training": seconds} | _tested(model, mll, data)


def _tested(model: DeepRegression, mll: Any, data: Split) -> Outcome:
    rmse, log_likelihood = posterior_scores(model, mll.posterior(), data)
    scale = data.target_scale
    return {
        "rmse": rmse * scale,
        "nlpd": -log_likelihood + float(torch.tensor(scale).log()),
        "noise": float(model.likelihood.noise.detach()) * scale**2,
        "train_rows": len(data.train_y),
    }


def full_batch(data: Split, *, kernel: str, steps: int, rate: float, seed: int) -> Outcome:
    """Adam on the exact marginal likelihood of all data: what mini-batches are measured against."""
    options = {"batch_size": len(data.train_y), "epochs": steps, "rate": rate, "seed": seed}
    return train(data, METHODS["natural"], kernel=kernel, **options)


def _loaded(
    run: Callable[..., Outcome], *given: Make, dataset: str, split: int, rows: int | None, **options: Any
) -> Outcome:
    return run(load(dataset, split, rows=rows), *given, seed=split, **options)


for _name, _make in METHODS.items():
    contender("feature-kernels", _name)(partial(_loaded, train, _make))
contender("feature-kernels", "full batch")(partial(_loaded, full_batch))


def table(found: Sequence[Measured]) -> Table:
    """A line a data set and method: means and standard deviations over splits, beside the published means."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for measured in found:
        groups.setdefault((measured.run.options["dataset"], measured.run.contender), []).append(measured)
    # A full batch alone has neither epochs nor a batch size.
    options = {"epochs": 0, "batch_size": 128}
    for measured in found:
        options |= measured.run.options
    return Table(
        f"network, {options['kernel']} kernel; b = {options['batch_size']}, {options['epochs']} epochs, Adam at "
        f"{options['rate']}; published: five splits, 100 epochs",
        [
            "data",
            "method",
            "splits",
            "NLML",
            "published minimax, SCGD, SVGP, BSGD",
            "RMSE",
            "published",
            "NLPD",
            "minutes",
        ],
        [
            _row(dataset, method, options["kernel"], options["batch_size"], [measured.outcome for measured in group])
            for (dataset, method), group in groups.items()
        ],
    )


def _row(dataset: str, method: str, kernel: str, batch_size: int, outcomes: list[Outcome]) -> list[str]:
    theirs = published.FEATURE_NLML[dataset].get(batch_size) if kernel == "linear" else None
    theirs_rmse = published.FEATURE_RMSE[dataset] if kernel == "linear" and batch_size == 128 else None
    shown = lambda figures: " ".join(f"{figure:.3f}" for figure in figures or ())
    column = lambda name: torch.tensor([outcome[name] for outcome in outcomes], dtype=torch.float64)
    spread = lambda name: f" ± {column(name).std(unbiased=False):.3f}" if len(outcomes) > 1 else ""
    mean_and_sd = lambda name: f"{column(name).mean():.3f}{spread(name)}"
    return [
        dataset,
        method,
        str(len(outcomes)),
        mean_and_sd("nlml"),
        shown(theirs),
        mean_and_sd("rmse"),
        shown(theirs_rmse),
        mean_and_sd("nlpd"),
        f"{column('seconds_training').mean() / 60:.1f}",
    ]


def draw_curves(found: Sequence[Measured], path: Path) -> Path:
    """NLML against epochs on the first split: a panel a data set, a line a method."""
    runs: dict[str, dict[str, Outcome]] = {}
    for measured in found:
        runs.setdefault(measured.run.options["dataset"], {}).setdefault(measured.run.contender, measured.outcome)
    rows = 1 if len(runs) < 4 else 2
    columns = -(-len(runs) // rows)
    size = (1 + 3.2 * columns, 0.3 + 2.6 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, constrained_layout=True, squeeze=False)
    for axis, (dataset, methods) in zip(axes.flat, runs.items(), strict=False):
        for name, outcome in methods.items():
            if name != "full batch":
                epochs, values = zip(*outcome["curve"], strict=True)
                axis.plot(epochs, values, marker=".", label=name)
        if "full batch" in methods:
            axis.axhline(methods["full batch"]["nlml"], color="black", linewidth=0.8, label="full batch")
        axis.set_title(dataset, fontsize=9)
        axis.set_xlabel("epochs", fontsize=8)
    for axis in list(axes.flat)[len(runs) :]:
        axis.axis("off")
    axes[0, 0].set_ylabel("NLML per datum")
    axes[0, 0].legend(fontsize=7)
    return save_figure(figure, path)


@app.command(name="feature-kernels")
def feature_kernels(
    dataset: Annotated[list[str] | None, names_of(published.FEATURE_NLML, "Data sets; all seven by default.")] = None,
    method: Annotated[
        list[str] | None,
        names_of(
            CONTENDERS["feature-kernels"],
            "natural, 'natural .2', 'natural falling', gradient, scgd, minimax, bsgd, 'full batch'.",
        ),
    ] = None,
    kernel: Annotated[str, typer.Option(help="linear (m = 128) or fourier (m = 1000), over the network.")] = "linear",
    batch_size: int = 128,
    epochs: int = 100,
    rate: Annotated[float, typer.Option(help="Adam's, falling to 0.")] = 0.01,
    splits: Annotated[int, typer.Option(help="Of the ten 90/10 splits; the publication has five.")] = 5,
    rows: FirstRows = None,
    full_steps: Annotated[int, typer.Option(help="Adam steps of the full batch.")] = 300,
    picture: Annotated[Path | None, typer.Option(help="File for the picture of NLML against epochs.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """NLML and RMSE by the protocol of Shoham and Avron, beside theirs. Goes on where it was interrupted."""
    runs = [
        planned_run(name, kind, split, rows, kernel, rate, batch_size, epochs, full_steps)
        for name in dataset or list(published.FEATURE_NLML)
        for kind in method or list(CONTENDERS["feature-kernels"])
        for split in range(splits)
    ]
    found = SavedRuns(RESULTS / "feature_kernels.json").execute(runs, threads, console)
    if found:
        console.print(table(found).for_terminal())
    if found and picture is not None:
        console.print(f"drew {draw_curves(found, picture)}")
    exit_if_missing(found, runs)


def planned_run(
    dataset: str,
    method: str,
    split: int,
    rows: int | None,
    kernel: str,
    rate: float,
    batch_size: int,
    epochs: int,
    full_steps: int,
) -> Run:
    """Full batches have steps in place of epochs."""
    options = {"dataset": dataset, "split": split, "rows": rows, "kernel": kernel, "rate": rate}
    own = {"steps": full_steps} if method == "full batch" else {"batch_size": batch_size, "epochs": epochs}
    return Run("feature-kernels", method, options | own)


def preset_runs(preset: Preset) -> list[Run]:
    """All methods, with full batches beside."""
    methods = list(CONTENDERS["feature-kernels"])
    if preset is Preset.PAPER:
        chosen, splits, sizes = list(published.FEATURE_NLML), 5, (None, "linear", 0.01, 128, 100, 300)
    elif preset is Preset.QUICK:
        chosen, splits, sizes = ["elevators"], 1, (None, "linear", 0.01, 128, 5, 15)
    else:
        chosen, splits, sizes = ["bike"], 1, (500, "linear", 0.01, 128, 1, 2)
    return [planned_run(name, kind, split, *sizes) for name in chosen for kind in methods for split in range(splits)]


register(
    Case(
        "feature-kernels",
        "Mini-batches for kernels with finitely many features, by the protocol of Shoham and Avron.",
        preset_runs,
        lambda found: [table(found)],
        lambda found, folder: [draw_curves(found, folder / "feature_kernels.svg")],
        note="[Measured](measured.md#deep-kernels) has a larger run.",
        shows_tables=False,
    )
)

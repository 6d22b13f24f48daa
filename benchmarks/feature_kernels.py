"""Kernels with finitely many features, by the protocol of Shoham and Avron: their four methods, ours, and full batches.

A network of two layers of 128 (ReLU after both) under a linear kernel, m = 128, or under random Fourier features,
m = 1000. Inputs standardised; targets are standardised for training, and all figures are in the units of the centred
targets, the published ones': NLML per training datum (with log 2 pi) at the exact marginal likelihood, RMSE on the 10 %
held out.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpytorch
import matplotlib
import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.datasets import Split, load
from benchmarks.quality import scores
from benchmarks.runner import RESULTS, Outcome, contender
from benchmarks.truncation_table import Progress

matplotlib.use("Agg")
from matplotlib import pyplot as plt

#: Methods of the publication, in the order of its columns.
COLUMNS = ("minimax", "scgd", "svgp", "bsgd")
#: Network and linear kernel: data set -> batch size -> published mean NLML of COLUMNS over five splits.
PUBLISHED: dict[str, dict[int, tuple[float, float, float, float]]] = {
    "bike": {
        32: (-1.482, -1.454, -0.895, -1.167),
        64: (-1.378, -1.366, -0.644, -1.282),
        128: (-1.340, -1.358, -0.832, -1.311),
    },
    "elevators": {
        32: (-1.588, -1.530, -0.150, -1.125),
        64: (-1.523, -1.427, -0.152, -1.139),
        128: (-1.678, -1.399, 0.044, -1.173),
    },
    "keggdirected": {
        32: (-0.745, -0.740, -0.151, -0.688),
        64: (-0.780, -0.748, -0.126, -0.726),
        128: (-0.805, -0.778, -0.189, -0.763),
    },
    "kin40k": {
        32: (-1.713, -1.760, 0.792, -0.684),
        64: (-1.654, -1.682, 0.298, -0.952),
        128: (-1.590, -1.618, 0.003, -1.224),
    },
    "pol": {
        32: (2.128, 2.016, 1.643, 2.689),
        64: (2.206, 2.171, 1.610, 2.413),
        128: (2.215, 2.150, 1.583, 2.223),
    },
    "protein": {
        32: (0.392, 0.393, 0.848, 0.640),
        64: (0.325, 0.381, 0.659, 0.618),
        128: (0.289, 0.327, 0.709, 0.576),
    },
    "tamielectric": {
        32: (0.178, 0.179, 0.179, 0.179),
        64: (0.178, 0.178, 0.179, 0.179),
        128: (0.178, 0.178, 0.179, 0.179),
    },
}
#: The same at a batch of 128: test RMSE.
PUBLISHED_RMSE: dict[str, tuple[float, float, float, float]] = {
    "bike": (0.125, 0.123, 0.111, 0.056),
    "elevators": (0.110, 0.101, 0.250, 0.091),
    "keggdirected": (0.116, 0.118, 0.370, 0.123),
    "kin40k": (0.073, 0.071, 0.283, 0.078),
    "pol": (2.469, 2.413, 2.537, 2.642),
    "protein": (0.435, 0.436, 0.513, 0.461),
    "tamielectric": (0.290, 0.289, 0.289, 0.289),
}
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


Make = Callable[[DeepRegression, int, int], MarginalLogLikelihood]
METHODS: dict[str, Make] = {
    "natural": lambda m, b, seed: gpi.mlls.VariationalFeatureMarginalLogLikelihood(
        m.likelihood, m, batch_size=b, generator=seed
    ),
    "natural .2": lambda m, b, seed: gpi.mlls.VariationalFeatureMarginalLogLikelihood(
        m.likelihood, m, batch_size=b, tracker_rate=0.2, generator=seed
    ),
    "gradient": lambda m, b, seed: gpi.mlls.VariationalFeatureMarginalLogLikelihood(
        m.likelihood, m, batch_size=b, update="gradient", generator=seed
    ),
    "scgd": lambda m, b, seed: gpi.mlls.CompositionalMarginalLogLikelihood(
        m.likelihood, m, batch_size=b, generator=seed
    ),
    "minimax": lambda m, b, seed: gpi.mlls.MinimaxMarginalLogLikelihood(m.likelihood, m, batch_size=b, generator=seed),
    "bsgd": lambda m, b, seed: gpi.mlls.MinibatchMarginalLogLikelihood(m.likelihood, m, batch_size=b, generator=seed),
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
    mll = make(model, batch_size, seed)
    optimizer = torch.optim.Adam(mll.parameters(), lr=rate)
    steps_an_epoch = len(data.train_y) // batch_size
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (epochs * steps_an_epoch))
    offset = float(torch.tensor(data.target_scale).log())
    curve: list[tuple[int, float]] = []
    best, best_state = float("inf"), model.state_dict()
    seconds = 0.0
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        with gpytorch.settings.debug(False):
            for _ in range(steps_an_epoch):
                optimizer.zero_grad()
                loss = -mll(model(data.train_x), data.train_y)
                loss.backward()
                optimizer.step()
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
    with torch.no_grad():
        prediction = model.likelihood(mll.posterior(data.test_x))
        rmse, log_likelihood = scores(prediction.mean, prediction.variance, data.test_y)
    scale = data.target_scale
    return {
        "rmse": rmse * scale,
        "nlpd": -log_likelihood + float(torch.tensor(scale).log()),
        "noise": float(model.likelihood.noise.detach()) * scale**2,
        "train_rows": len(data.train_y),
    }


def full_batch(data: Split, *, kernel: str, steps: int, rate: float, seed: int) -> Outcome:
    """Adam on the exact marginal likelihood of all data: what mini-batches are measured against."""
    make: Make = lambda m, b, seed: gpi.mlls.VariationalFeatureMarginalLogLikelihood(
        m.likelihood, m, batch_size=len(data.train_y), generator=seed
    )
    return train(
        data, make, kernel=kernel, batch_size=len(data.train_y), epochs=steps, rate=rate, seed=seed, refresh_every=1
    )


def _register(name: str, make: Make) -> None:
    @contender("feature-kernels", name)
    def run(*, dataset: str, split: int, rows: int | None, **options: Any) -> Outcome:
        return train(load(dataset, split, rows=rows), make, seed=split, **options)


for _name, _make in METHODS.items():
    _register(_name, _make)


@contender("feature-kernels", "full batch")
def _full_batch(*, dataset: str, split: int, rows: int | None, **options: Any) -> Outcome:
    return full_batch(load(dataset, split, rows=rows), seed=split, **options)


def progress() -> Progress:
    """Finished runs, with which an interrupted table goes on."""
    return Progress(RESULTS / "feature_kernels.json")


HEADER = [
    "data",
    "method",
    "splits",
    "NLML",
    "published minimax, SCGD, SVGP, BSGD",
    "RMSE",
    "published",
    "NLPD",
    "minutes",
]


def row(dataset: str, method: str, kernel: str, batch_size: int, outcomes: list[Outcome]) -> list[str]:
    """A line of the table: means and standard deviations over splits, beside the published means."""
    published = PUBLISHED[dataset].get(batch_size) if kernel == "linear" else None
    published_rmse = PUBLISHED_RMSE[dataset] if kernel == "linear" and batch_size == 128 else None
    shown = lambda figures: " ".join(f"{figure:.3f}" for figure in figures or ())
    column = lambda name: torch.tensor([outcome[name] for outcome in outcomes], dtype=torch.float64)
    mean_and_sd = lambda name: f"{column(name).mean():.3f} ± {column(name).std(unbiased=False):.3f}"
    return [
        dataset,
        method,
        str(len(outcomes)),
        mean_and_sd("nlml"),
        shown(published),
        mean_and_sd("rmse"),
        shown(published_rmse),
        mean_and_sd("nlpd"),
        f"{column('seconds_training').mean() / 60:.1f}",
    ]


def draw_curves(runs: dict[str, dict[str, Outcome]], path: Path) -> None:
    """NLML against epochs: a panel a data set, a line a method."""
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)

"""The demo: hourly temperature at New York's three airports through 2013, 26,115 observations on a Gaussian process.

Whole days are held out. The rival is a sparse variational Gaussian process of GPyTorch with the same kernel, given
the same wall-clock time.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import gpytorch
import numpy as np
import pandas as pd
import torch
import typer
from rich.console import Console
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import app, console
from benchmarks.datasets import Split, airport_weather, standardise
from benchmarks.metrics import regression_scores
from benchmarks.plots import plt, save_figure
from benchmarks.runs import progress_bar
from benchmarks.training import posterior_scores, start_from_neighbourhoods
from benchmarks.variational import VariationalGP, VariationalTraining, random_rows

#: Longitude and latitude in degrees.
AIRPORTS = {"EWR": (-74.17, 40.69), "JFK": (-73.78, 40.64), "LGA": (-73.87, 40.78)}
HELD_OUT_EVERY = 7
WEEK = ("2013-04-08", "2013-04-22")


class WeatherRegression(gpytorch.models.ExactGP):
    """One Matern-3/2 kernel over time, time of day and place."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = weather_kernel()

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def weather_kernel() -> gpytorch.kernels.Kernel:
    """Columns: day of the year, cosine and sine of the hour, longitude, latitude; all standardised."""
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=5))
    # A day, a quarter of a turn, the distance between the airports.
    kernel.base_kernel.lengthscale = torch.tensor([[0.02, 2.0, 2.0, 4.0, 4.0]])
    return kernel


def weather() -> tuple[Split, pd.DataFrame, pd.DataFrame]:
    """Standardised split, and the frames of its training and test rows."""
    frame = airport_weather().dropna(subset=["temp"]).reset_index(drop=True)
    when = pd.to_datetime(frame["time_hour"], utc=True).dt.tz_convert("America/New_York")
    frame["when"] = when.dt.tz_localize(None)
    frame["celsius"] = (frame["temp"] - 32) * 5 / 9
    hours = (frame["when"] - pd.Timestamp("2013-01-01")) / pd.Timedelta(hours=1)
    angle = 2 * np.pi * (hours % 24) / 24
    places = np.array([AIRPORTS[origin] for origin in frame["origin"]])
    x = np.column_stack([hours / 24, np.cos(angle), np.sin(angle), places])
    day = np.floor(hours / 24).astype(int)
    # Every seventh day at one airport, a different day at each: its neighbours' weather is known.
    offset = frame["origin"].map({"EWR": 0, "JFK": 2, "LGA": 4})
    held_out = ((day + offset) % HELD_OUT_EVERY == 0).to_numpy()
    y = frame["celsius"].to_numpy()
    split = standardise("weather", x[~held_out], y[~held_out], x[held_out], y[held_out], torch.float32)
    return split, frame[~held_out], frame[held_out]


def run(*, max_steps: int, out: Path, with_svgp: bool, console: Console) -> dict[str, tuple[float, float]]:
    """Trains, predicts, compares and plots. Returns RMSE and log-likelihood of each contender."""
    split, train_frame, test_frame = weather()
    console.print(f"{len(split.train_y):,} training rows, {len(split.test_y):,} rows of held-out days")
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.05
    model = WeatherRegression(split.train_x, split.train_y, likelihood)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)

    start = time.perf_counter()
    with console.status("start: fits to two neighbourhoods of 1,500 rows"):
        start_from_neighbourhoods(model)
    started = time.perf_counter()
    result = gpi.fit(mll, max_steps=max_steps, callback=lambda row: console.print(str(row)), progress=False)
    trained = time.perf_counter() - started
    posterior = mll.posterior()
    results = {"ours": posterior_scores(model, posterior, split)}
    seconds = time.perf_counter() - start
    console.print(f"{result.status.name}: {result.status.advice}")
    console.print(*map(str, result.hyperparameters), sep="\n")
    if result.irrelevant:
        console.print(f"The data may do without the inputs of {', '.join(result.irrelevant)}.")
    console.print(
        f"started in {started - start:.0f} s, trained in {trained:.0f} s, "
        f"predicted in {seconds - trained - (started - start):.0f} s"
    )

    if with_svgp:
        predict = train_svgp(split, seconds, console)
        with torch.no_grad():
            results["SVGP, 512 inducing points, same time"] = regression_scores(*predict(split.test_x), split.test_y)
    for name, (rmse, log_likelihood) in results.items():
        console.print(f"{name}: RMSE {rmse:.4f}, log-likelihood {log_likelihood:.4f} (standardised)")
    path = out / "demo.png"
    plot(path, split, posterior, likelihood, train_frame, test_frame)
    console.print(f"saved {path}")
    return results


def train_svgp(split: Split, seconds: float, console: Console) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """512 inducing points and mini-batches of 1,024 for so many seconds; returns the predictor."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.05
    inducing = random_rows(split.train_x, 512)
    model = VariationalGP(inducing, gpytorch.means.ConstantMean(), weather_kernel())
    training = VariationalTraining(model, likelihood, split.train_x, split.train_y)
    with progress_bar(console) as bar:
        task = bar.add_task("SVGP", total=round(seconds), figures="")
        training.train_for(seconds, lambda spent, loss: bar.update(task, completed=spent, figures=f"loss {loss:.4f}"))

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        prediction = training.predict(x)
        return prediction.mean, prediction.variance

    return predict


def plot(
    path: Path,
    split: Split,
    posterior: gpi.prediction.PathwisePosterior,
    likelihood: gpytorch.likelihoods.GaussianLikelihood,
    train_frame: pd.DataFrame,
    test_frame: pd.DataFrame,
) -> None:
    """Two weeks at one airport: observations, held-out days, and the predictive band."""
    inside = lambda frame: ((frame["origin"] == "JFK") & frame["when"].between(*WEEK)).to_numpy(copy=True)
    train, test = inside(train_frame), inside(test_frame)
    x = torch.cat([split.train_x[train], split.test_x[test]])
    when = np.concatenate([train_frame["when"][train].to_numpy(), test_frame["when"][test].to_numpy()])
    order = np.argsort(when)
    with torch.no_grad():
        prediction = likelihood(posterior(x[order]))
    mean, scale = train_frame["celsius"].mean(), train_frame["celsius"].std(ddof=0)
    centre = prediction.mean.numpy() * scale + mean
    spread = 2 * prediction.stddev.numpy() * scale
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    axes.fill_between(when[order], centre - spread, centre + spread, alpha=0.25, lw=0, label="95 % predictive band")
    axes.plot(when[order], centre, lw=1.2, label="predictive mean")
    axes.plot(train_frame["when"][train], train_frame["celsius"][train], ".", ms=3, color="0.3", label="observed")
    axes.plot(test_frame["when"][test], test_frame["celsius"][test], "x", ms=4, color="tab:red", label="held out")
    axes.set_ylabel("temperature at JFK, °C")
    axes.legend(ncols=4, loc="upper left", fontsize=8)
    axes.margins(x=0)
    save_figure(figure, path)


@app.command()
def demo(
    max_steps: Annotated[int, typer.Option(help="Of the fit at the most.")] = 5,
    out: Path = Path("out"),
    svgp: Annotated[bool, typer.Option(help="Train the rival too.")] = True,
) -> None:
    """Hourly weather of three airports: train, predict, compare, plot."""
    run(max_steps=max_steps, out=out, with_svgp=svgp, console=console)

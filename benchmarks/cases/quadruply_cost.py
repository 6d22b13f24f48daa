"""Cost of a quadruply stochastic step against n and m, and its noise with and without the control variate."""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import gpytorch
import torch
import typer

import gpy_iterative as gpi
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenData,
    Threads,
    app,
    console,
    finish,
    run_contenders,
    show,
    succeeded_or_exit,
)
from benchmarks.datasets import load
from benchmarks.devices import peak_process_memory
from benchmarks.plots import plt, save_figure
from benchmarks.runner import Outcome, contender

#: Input dimensions of the synthetic data of the cost table.
DIMS = 8


@contender("quadruply-cost", "step")
def step_cost(
    *, num_data: int, num_features: int, steps: int, feature_samples: int, rows: int, points: int | None
) -> Outcome:
    """Seconds of a step, its own memory beyond what parameters and data take, and seconds of the first one.

    Without control points rows are kept, and a step's seconds contain its share of what their draw costs.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, DIMS, generator=generator)
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(num_data, generator=generator)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=DIMS)).requires_grad_(False)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().requires_grad_(False)
    model = gpi.models.QuadruplyStochasticGP(gpi.models.RandomFourierBasis(kernel, num_features))
    mll = gpi.mlls.QuadruplyStochasticELBO(
        likelihood,
        model,
        num_feature_samples=feature_samples,
        num_data_samples=rows,
        num_control_points=points,
        generator=0,
    )
    optimizer = torch.optim.Adagrad(model.variational_parameters(), lr=0.1)
    seconds = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 2:
            before = peak_process_memory()
    start = time.perf_counter()
    mll.refresh()  # from all features, as a draw of other rows does
    share = (time.perf_counter() - start) / mll.num_steps_per_batch if points is None else 0.0
    return {
        "seconds": statistics.median(seconds[3:]) + share,
        "seconds_of_draws": share,
        "seconds_first": seconds[0],
        "memory_growth_mb": peak_process_memory() - before,
    }


#: Estimates without and with the control variate.
ESTIMATORS = ("residual product", "with a control variate")


def control_variances(
    *, dataset: str, num_features: int, samples: int, rows: int, points: list[int], draws: int, lengthscale: float
) -> list[dict[str, Any]]:
    """Standard deviation of value and gradient of mu, at weights drawn from the prior (figure 1 of the paper)."""
    data = load(dataset, 0)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=data.train_x.shape[-1]))
    kernel.base_kernel.lengthscale = lengthscale
    kernel.outputscale = 1.0
    kernel.requires_grad_(False)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().requires_grad_(False)
    likelihood.noise = 0.01
    model = gpi.models.QuadruplyStochasticGP(gpi.models.RandomFourierBasis(kernel, num_features))
    with torch.no_grad():
        model.weights.tail_mean.copy_(torch.randn(num_features, 1, generator=torch.Generator().manual_seed(0)))
        model.weights.tail_log_diagonal.fill_(-2.0)
        model.weights.initialized.fill_(1)
    found = []
    for count in (0, *points):
        mll = gpi.mlls.QuadruplyStochasticELBO(
            likelihood,
            model,
            num_feature_samples=samples,
            num_data_samples=rows,
            num_control_points=count,
            generator=1,
        )
        values, total, squares = [], 0.0, 0.0
        for _ in range(draws):
            value = mll(model(data.train_x), data.train_y)
            (gradient,) = torch.autograd.grad(value, model.weights.tail_mean)
            dense = gradient.to_dense().double()
            values.append(value.item())
            total, squares = total + dense, squares + dense.square()
        mean = total / draws
        variance = (squares / draws - mean.square()).sum() * draws / (draws - 1)
        found.append(
            {
                "estimator": ESTIMATORS[count > 0],
                "points": count,
                "value_sd": statistics.stdev(values),
                "gradient_variance": float(variance),
                "mean": statistics.mean(values),
            }
        )
    return found


def draw_variances(table: list[dict[str, Any]], folder: Path) -> Path:
    """Against the number of support points, relative to no control variate."""
    reference, *others = table
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), constrained_layout=True)
    for axis, field, power, title in (
        (axes[0], "value_sd", 2, "value"),
        (axes[1], "gradient_variance", 1, "gradient of the weights' mean"),
    ):
        ratio = [(row[field] / reference[field]) ** power for row in others]
        axis.plot([row["points"] for row in others], ratio, marker="o")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_xlabel("support points")
        axis.set_title(title)
    axes[0].set_ylabel("variance, relative to none")
    return save_figure(figure, folder / "quadruply_control_variate.svg")


@app.command(name="quadruply-cost")
def quadruply_cost(
    steps: int = 15,
    feature_samples: int = 4000,
    rows: int = 500,
    points: Annotated[int | None, typer.Option(help="Control points; rows are kept where none are given.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds of a quadruply stochastic step against the number of data and of features."""
    options = {"steps": steps, "feature_samples": feature_samples, "rows": rows, "points": points}
    outcomes = {}
    for n, m in ((10_000, 100_000), (1_000_000, 100_000), (10_000, 1_000_000), (1_000_000, 1_000_000)):
        size = {"num_data": n, "num_features": m}
        found = run_contenders("quadruply-cost", ["step"], threads=threads, **size, **options)
        outcomes[f"n={n} m={m}"] = found["step"]
    show(
        f"{feature_samples} sampled features, {rows} rows, {'rows kept' if points is None else f'{points} control points'}",
        ["problem", "s / step", "of it draws", "first", "MB beyond the second step"],
        [
            [
                name,
                *(f"{o[field]:.4f}" for field in ("seconds", "seconds_of_draws", "seconds_first")),
                f"{o['memory_growth_mb']:.0f}",
            ]
            for name, o in succeeded_or_exit(outcomes).items()
        ],
    )
    finish("quadruply_cost", options, threads, outcomes=outcomes)


@app.command(name="quadruply-variance")
def quadruply_variance(
    dataset: ChosenData = "kin40k",
    features: int = 10_000,
    samples: int = 500,
    rows: int = 500,
    draws: int = 300,
    lengthscale: float = 2.5,
    points: Annotated[list[int] | None, typer.Option(help="Support points; 50, 100, 200, 400 by default.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for the picture of the documentation.")] = None,
) -> None:
    """Noise of value and gradient with and without the control variate."""
    counts = points or [50, 100, 200, 400]
    options = {"dataset": dataset, "num_features": features, "samples": samples, "rows": rows, "draws": draws}
    options |= {"points": counts, "lengthscale": lengthscale}
    table = control_variances(**options)
    show(
        f"{dataset}, {features} features, {samples} sampled, {draws} draws",
        ["data term", "points", "mean", "sd of the value", "gradient variance"],
        [
            [
                row["estimator"],
                str(row["points"]),
                f"{row['mean']:.4g}",
                f"{row['value_sd']:.3g}",
                f"{row['gradient_variance']:.3g}",
            ]
            for row in table
        ],
    )
    if pictures is not None:
        console.print(f"drew {draw_variances(table, pictures)}")
    finish("quadruply_variance", options, torch.get_num_threads(), table=table)

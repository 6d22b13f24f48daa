"""Odd against even digits by logistic features, beside a least-squares support vector machine with the exact kernel."""

import time
from typing import Annotated

import gpytorch
import torch
import typer
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, finish, run_contenders
from benchmarks.datasets import mnist_test_file
from benchmarks.runner import Outcome, contender

#: Training digits of the 10,000 in the file; the others are the test set.
TRAINING = 8000


def digits() -> tuple[Tensor, Tensor]:
    """Pixels [10000, 784], and whether a digit is odd, [10000]."""
    pixels, labels = mnist_test_file()
    return torch.from_numpy(pixels), torch.from_numpy(labels % 2).float()


def median_lengthscale(x: Tensor) -> float:
    """The median distance between digits."""
    return float(torch.pdist(x[:1000]).median())


def _scores(probability: Tensor, target: Tensor) -> dict[str, float]:
    right = (probability > 0.5) == (target > 0.5)
    chosen = torch.where(target > 0.5, probability, 1 - probability).clamp_min(1e-6)
    return {"accuracy": float(right.float().mean()), "nlpd": -float(chosen.log().mean())}


@contender("quadruply-digits", "ours")
def ours(
    *, basis: str, features: int, feature_samples: int, rows: int, steps: int, outputscale: float, shrink: float
) -> Outcome:
    """The site bound, with fixed hyperparameters: the median distance times `shrink` as lengthscale."""
    x, y = digits()
    train_x, train_y, test_x, test_y = x[:TRAINING], y[:TRAINING], x[TRAINING:], y[TRAINING:]
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    kernel.base_kernel.lengthscale = shrink * median_lengthscale(train_x)
    kernel.outputscale = outputscale
    kernel.requires_grad_(False)
    start = time.perf_counter()
    if basis == "rff":
        made = gpi.models.RandomFourierBasis(kernel, features, num_dims=784)
    else:
        made = gpi.models.NystromBasis(kernel, train_x[:features])
    likelihood = gpi.likelihoods.LogitBernoulliLikelihood()
    model = gpi.models.QuadruplyStochasticGP(made)
    mll = gpi.mlls.QuadruplyStochasticELBO(
        likelihood,
        model,
        num_feature_samples=feature_samples if basis == "rff" else None,
        num_data_samples=rows,
        generator=0,
    )
    optimizer = gpi.models.QuadruplyStochasticOptimizer(
        model, num_data=TRAINING, num_steps=steps, hyper_learning_rate=0
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(model(train_x), train_y)
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        latent = model(test_x)
        median = _scores(likelihood.median(latent), test_y)
        mean = _scores(likelihood(latent).probs, test_y)
    return {"seconds": seconds, "median": median, "mean": mean}


@contender("quadruply-digits", "exact kernel")
def exact_kernel(*, shrink: float, **_: object) -> Outcome:
    """A least-squares support vector machine with the exact kernel; its penalty by an eighth of the training rows."""
    x, y = digits()
    sign = 2 * y - 1
    scale = shrink * median_lengthscale(x[:TRAINING])
    gram = lambda a, b: torch.exp(-torch.cdist(a, b).square() / (2 * scale**2)).double()
    inner = TRAINING * 7 // 8
    matrix, cross = gram(x[:TRAINING], x[:TRAINING]), gram(x[TRAINING:], x[:TRAINING])
    best, chosen = -1.0, 0.0
    for penalty in (1e-3, 1e-2, 1e-1, 1.0):
        alpha = torch.linalg.solve(matrix[:inner, :inner] + penalty * torch.eye(inner).double(), sign[:inner].double())
        found = float(((matrix[inner:, :inner] @ alpha > 0) == (sign[inner:TRAINING] > 0)).float().mean())
        best, chosen = max((best, chosen), (found, penalty))
    alpha = torch.linalg.solve(matrix + chosen * torch.eye(TRAINING).double(), sign[:TRAINING].double())
    return {"accuracy": float(((cross @ alpha > 0) == (sign[TRAINING:] > 0)).float().mean()), "penalty": chosen}


@app.command(name="quadruply-digits")
def quadruply_digits(
    basis: Annotated[str, typer.Option(help="rff or nystrom.")] = "nystrom",
    features: int = 3000,
    feature_samples: int = 2000,
    rows: int = 500,
    steps: int = 700,
    outputscale: float = 10.0,
    shrink: Annotated[float, typer.Option(help="Lengthscale over the median distance.")] = 0.5,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Odd or even digits: logistic site bound beside a machine with the exact kernel."""
    options = {"basis": basis, "features": features, "feature_samples": feature_samples, "rows": rows}
    options |= {"steps": steps, "outputscale": outputscale, "shrink": shrink}
    outcomes = run_contenders("quadruply-digits", ["ours", "exact kernel"], threads=threads, **options)
    console.print(outcomes)
    finish(f"quadruply_digits_{basis}", options, threads, outcomes=outcomes)

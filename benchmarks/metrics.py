"""What predictions are judged by."""

import math
from collections.abc import Callable

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

#: Rows that are predicted at a time.
CHUNK = 4096


def root_mean_square(numbers: Tensor) -> float:
    """Of all numbers."""
    return float(numbers.square().mean().sqrt())


def regression_scores(mean: Tensor, variance: Tensor, target: Tensor) -> tuple[float, float]:
    """RMSE, and the mean log density of each target under its own predictive normal."""
    rmse = root_mean_square(mean - target)
    log_density = -0.5 * ((mean - target).square() / variance + variance.log() + math.log(2 * math.pi))
    return rmse, float(log_density.mean())


@torch.no_grad()
def prediction_scores(predict: Callable[[Tensor], MultivariateNormal], x: Tensor, y: Tensor) -> tuple[float, float]:
    """`regression_scores` of what is predicted of targets y [t] at x [t, d], some rows at a time."""
    parts = [predict(rows) for rows in x.split(CHUNK)]
    mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
    return regression_scores(mean, variance, y)


def classification_scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, NLL and the 15-bin expected calibration error of class probabilities [t, C]."""
    confidence, label = probabilities.double().max(-1)
    right = (label == y).double()
    error = 0.0
    for low in torch.linspace(0, 1, 16, dtype=torch.float64)[:-1]:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            error += float(inside.double().mean() * (right[inside].mean() - confidence[inside].mean()).abs())
    chosen = probabilities.double().gather(-1, y.unsqueeze(-1)).clamp_min(1e-300)
    return {"accuracy": float(right.mean()), "nll": float(-chosen.log().mean()), "ece": error}

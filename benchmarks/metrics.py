"""What predictions are judged by."""

import math

import torch
from torch import Tensor


def regression_scores(mean: Tensor, variance: Tensor, target: Tensor) -> tuple[float, float]:
    """RMSE, and the mean log density of each target under its own predictive normal."""
    rmse = float((mean - target).square().mean().sqrt())
    log_density = -0.5 * ((mean - target).square() / variance + variance.log() + math.log(2 * math.pi))
    return rmse, float(log_density.mean())


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

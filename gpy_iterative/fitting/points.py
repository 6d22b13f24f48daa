"""Points on the way to the optimum: an evaluation, what is known about it, and the step from one to the next."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.exact.base import Evaluation
from gpy_iterative.fitting.curvature import Curvature

#: Parts of the average information between which a step tells the curvature along itself.
SEEN_CURVATURE = (0.05, 4.0)


@dataclass(frozen=True)
class Point:
    """An evaluation of the marginal log likelihood at one position of the coordinates.

    Attributes:
        position: [p].
        value: log marginal likelihood in nats, priors included, summed over a batch.
        error: its standard error.
        gradient: [p].
        evaluation: with graph and solves.
        before: training state of the marginal log likelihood before the evaluation, which repeats it exactly.
        epochs: passes over the kernel matrix.
    """

    position: Tensor
    value: float
    error: float
    gradient: Tensor
    evaluation: Evaluation
    before: Mapping[str, Tensor]
    epochs: float


@dataclass(frozen=True)
class Assessment:
    """What is known about a point: curvature, and what is left to gain.

    Attributes:
        curvature: the average information.
        gradient: [p], corrected for the residual of the targets' solve.
        held: [p], coordinates at a bound that the gradient pushes against.
        left: 1/2 g^T A^-1 g, nats that are left to gain.
        noise: what the probes' noise is expected to add to it, or to hide of it; 0 for an exact gradient.
        samples: [k, p], samples of the gradient's noise; k is 0 for an exact one.
        ridge: [p], added to the diagonal of A.
    """

    curvature: Curvature
    gradient: Tensor
    held: Tensor
    left: float
    noise: float
    samples: Tensor
    ridge: Tensor

    def error_along(self, move: Tensor) -> float:
        """Standard error of the predicted gain that comes from the gradient's noise."""
        return float((self.samples @ move).square().sum() / max(len(self.samples), 1)) ** 0.5

    @property
    def matrix(self) -> Tensor:
        """A with its ridge, [p, p]."""
        return self.curvature.matrix + torch.diag(self.ridge)

    def energy(self, gradients: Tensor) -> float:
        """The mean of 1/2 g^T A^-1 g over gradients [k, p], in the coordinates that are free."""
        free = ~self.held
        solved = torch.linalg.solve(self.matrix[free][:, free], gradients[:, free].mT)
        return float(0.5 * (gradients[:, free].mT * solved).sum(0).mean())


@dataclass(frozen=True)
class Step:
    """A step that was made.

    Attributes:
        length: the largest move of a coordinate; 0 for no step.
        predicted: gain that the quadratic model predicted, nats.
        gained: nats; the difference of the two values where `seen`, else by the trapezoidal rule from the two gradients.
        seen: whether the predicted gain was larger than the noise of the values.
        trials: evaluations, those that were undone among them.
        epochs: passes over the kernel matrix of all trials; those of the curvature are in the assessment.
        seconds: wall-clock time.
    """

    length: float
    predicted: float
    gained: float
    seen: bool
    trials: int
    epochs: float
    seconds: float


@dataclass(frozen=True)
class Secant:
    """What a step has seen: its move [p], and how much the gradient fell along it, [p]."""

    move: Tensor
    change: Tensor

    def seen_in(self, matrix: Tensor) -> Tensor:
        """A curvature [p, p] with that which the step has seen along itself; as it is where that is out of range."""
        product = matrix @ self.move
        expected = self.move @ product
        part = float(self.move @ self.change / expected)
        least, most = SEEN_CURVATURE
        if not least < part < most:
            return matrix
        return matrix - (1 - part) / expected * torch.outer(product, product)

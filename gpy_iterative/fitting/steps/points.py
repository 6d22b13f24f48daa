import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.exact.base import Evaluation
from gpy_iterative.fitting.steps.curvature import Curvature
from gpy_iterative.linear_solvers.solution import SolveStatus

#: Used range, relative to the average information.
SEEN_CURVATURE = (0.05, 4.0)


@dataclass(frozen=True)
class Point:
    """An evaluation of the marginal log likelihood.

    Attributes:
        position, gradient: [p].
        value: log marginal likelihood in nats, with priors, summed over a batch.
        error: its standard error.
        num_data: of each member of a batch.
        per_datum: value and standard error as the mll tells them, means over a batch.
        before: the mll's training state, to repeat the evaluation.
        epochs: passes over the kernel matrix.
        evaluation: with graph and solves, or None.
    """

    position: Tensor
    value: float
    error: float
    gradient: Tensor
    num_data: int
    per_datum: tuple[float, float]
    status: SolveStatus
    before: Mapping[str, Tensor]
    epochs: float
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class Assessment:
    """Curvature at a point, and nats left to gain.

    Attributes:
        gradient: [p], corrected for the residual of the targets' solve.
        held: [p], coordinates that the gradient pushes against a bound.
        left: 1/2 g^T A^-1 g, nats left to gain with these probes.
        noise: mean of 1/2 e^T A^-1 e over errors e of the gradient from probe noise.
        samples: [k, p], noise samples of the gradient; k is 0 for an exact one.
        ridge: [p], added to the diagonal of A.
        radius: [p], largest moves.
    """

    curvature: Curvature
    gradient: Tensor
    held: Tensor
    left: float
    noise: float
    samples: Tensor
    ridge: Tensor
    radius: Tensor

    def error_along(self, move: Tensor) -> float:
        """Standard error of the predicted gain from the gradient's noise."""
        return float((self.samples @ move).square().sum() / max(len(self.samples), 1)) ** 0.5

    def expected(self) -> tuple[float, float]:
        """Nats left to gain without probe noise, and their error.

        Steps with the same probes climb a function whose optimum is A^-1 e away from the true one. There
        1/2 (g - e)^T A^-1 (g - e) are left, with mean `left + noise`. The error is that of g^T A^-1 e, and `noise` for the
        spread of 1/2 e^T A^-1 e.
        """
        free, move = ~self.held, torch.zeros_like(self.gradient)
        move[free] = self._solved(self.gradient[free])
        return self.left + self.noise, math.hypot(self.noise, self.error_along(move))

    @property
    def matrix(self) -> Tensor:
        """A with its ridge, [p, p]."""
        return self.curvature.matrix + torch.diag(self.ridge)

    def energy(self, gradients: Tensor) -> float:
        """Mean of 1/2 g^T A^-1 g over gradients [k, p], in the free coordinates."""
        columns = gradients[:, ~self.held].mT
        return float(0.5 * (columns * self._solved(columns)).sum(0).mean())

    def _solved(self, columns: Tensor) -> Tensor:
        free = ~self.held
        return torch.linalg.solve(self.matrix[free][:, free], columns)


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        length: largest move of a coordinate.
        predicted: gain by the quadratic model, nats.
        gained: nats; the difference of the values if `seen`, else by the trapezoidal rule for the gradients.
        seen: whether the predicted gain exceeded the values' noise.
        trials: evaluations, with undone ones.
        epochs: of all trials, without the curvature's.
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
    """A step's move [p], the gradient's decrease [p], and whether it gained far less than predicted."""

    move: Tensor
    change: Tensor
    is_poor: bool

    def seen_in(self, matrix: Tensor, *, is_near: bool) -> Tensor:
        """The matrix [p, p] with the curvature along the step, if that is in `SEEN_CURVATURE`.

        Far from the end only a poor step may raise it.
        """
        seen = float(self.move @ self.change)
        part = seen / float(self.move @ matrix @ self.move)
        least, most = SEEN_CURVATURE
        if not least < part < most or not (is_near or (self.is_poor and part > 1)):
            return matrix
        return with_curvature(matrix, self.move, seen)


def with_curvature(matrix: Tensor, move: Tensor, seen: float) -> Tensor:
    """The matrix [p, p] with this curvature along a move; conjugate directions keep theirs."""
    product = matrix @ move
    expected = float(move @ product)
    return matrix - (1 - seen / expected) / expected * torch.outer(product, product)


def with_change(matrix: Tensor, move: Tensor, change: Tensor) -> Tensor:
    """The matrix [p, p] whose product with a move is the change of the gradient (BFGS)."""
    product = matrix @ move
    return matrix + torch.outer(change, change) / (move @ change) - torch.outer(product, product) / (move @ product)

"""Stochastic compositional gradient descent: a running average inside of the log-determinant.

Shoham and Avron, "Unbiased Stochastic Optimization for Gaussian Processes on Finite Dimensional RKHS", section 4.2.
"""

from collections.abc import Callable

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.features.base import FeatureMarginalLogLikelihood, num_steps
from gpy_iterative.features.weight_space.problem import WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import (
    TrackerRate,
    WeightDistribution,
    exact_statistics,
    surrogate,
    triangular_root,
)
from gpy_iterative.training.run import Run


class CompositionalMarginalLogLikelihood(FeatureMarginalLogLikelihood):
    """The marginal likelihood by stochastic compositional gradient descent (SCGD).

    The weights' posterior precision P = I + sum_i z_i z_i^T / s_i is tracked by a moving average of its batch estimates,
    through whose inverse the log-determinant's gradient goes; the weights w are parameters of this module, to be trained
    with the others: `Adam(mll.parameters())`. The value is no bound.

    Args:
        likelihood, model, batch_size, generator: as in `VariationalFeatureMarginalLogLikelihood`.
        tracker_rate: b_t in (0, 1], or a function of the step's number (from 0); None is min(.05, .1 b / m), falling
            with the square root of the steps to .001. The inverse of an average over N = b (2 - b_t) / b_t rows is too
            large by 1 / (1 - m / N).

    Differs from the paper: the tracker starts with the exact P; sums over a batch are weighted with n / b; P is divided by
    the noise. Costs as `VariationalFeatureMarginalLogLikelihood`.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        batch_size: int | None = None,
        tracker_rate: float | Callable[[int], float] | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        options = {"tracker_rate": tracker_rate}
        super().__init__(likelihood, model, batch_size=batch_size, generator=generator, options=options)
        self.tracker_rate = TrackerRate.of(tracker_rate, self._current_batch_size(), self.num_features)
        zeros, identity = self._blank_state()
        self.mean = torch.nn.Parameter(zeros)
        self._run = self._run.having(weights={"precision": identity})

    def _start(self, problem: WeightSpaceProblem, run: Run) -> Run:
        precision, moment = exact_statistics(problem, centred=False)
        mean = WeightDistribution.from_precision(precision, moment).mean
        return run.having(weights={"precision": precision}, parameters={"mean": mean})

    def _weights(self, run: Run) -> WeightDistribution:
        lower = triangular_root(run.parts["weights"]["precision"])
        return WeightDistribution.from_precision_root(lower, run.parts["parameters"]["mean"])

    def _step(self, problem: WeightSpaceProblem, rows: Tensor, run: Run) -> tuple[Tensor, Run]:
        batch, weights = self._batch(problem, rows), self._weights(run)
        loss = surrogate(batch, weights.mean, weights.root, weights.root)
        with torch.no_grad():
            # The value is that of log|P|, where the gradient is one of <P^-1, batch estimate of P>.
            nothing = torch.zeros_like(weights.root[:, :1])
            value = surrogate(batch, weights.mean, nothing, nothing) - weights.log_determinant
            # At the hyperparameters before the optimiser's step, as in the paper.
            rate = self.tracker_rate(num_steps(run))
            tracked = torch.lerp(run.parts["weights"]["precision"], batch.precision(), rate)
        return loss - loss.detach() + value, run.having(weights={"precision": tracked})

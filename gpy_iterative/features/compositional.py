"""SCGD.

Shoham and Avron, section 4.2: see `minimax.py`.
"""

from collections.abc import Callable

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.features.base import FeatureMarginalLogLikelihood, num_steps
from gpy_iterative.features.weight_space.problem import WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import TrackerRate, WeightDistribution, exact_statistics, surrogate
from gpy_iterative.linear_solvers.cholesky import positive_factor
from gpy_iterative.training.run import Run


class CompositionalMarginalLogLikelihood(FeatureMarginalLogLikelihood):
    """Marginal likelihood by stochastic compositional gradient descent (SCGD).

    A moving average of the weights' posterior precision P gives the log-determinant's gradient. The weights are parameters:
    train with `Adam(mll.parameters())`. The value is not a bound.

    Args:
        likelihood, model, batch_size, tracker_rate, generator: as in `VariationalFeatureMarginalLogLikelihood`. At a rate
            r, the inverse of the average, over N = b (2 - r) / r rows, is too large by 1 / (1 - m / N).

    Unlike in the paper, the first P is exact, batch sums are weighted by n / b, and P is divided by the noise.
    """

    _described = (*FeatureMarginalLogLikelihood._described, "tracker_rate")

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        batch_size: int | None = None,
        tracker_rate: float | Callable[[int], float] | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        super().__init__(likelihood, model, batch_size=batch_size, generator=generator)
        self.tracker_rate = tracker_rate
        self._rate = TrackerRate(tracker_rate, self._current_batch_size(), self.num_features)
        zeros, identity = self._blank_state()
        self.mean = torch.nn.Parameter(zeros)
        self._run = self._run.having(weights={"precision": identity})

    def _start(self, problem: WeightSpaceProblem, run: Run) -> Run:
        precision, moment = exact_statistics(problem, centred=False)
        mean = WeightDistribution.from_precision(precision, moment).mean
        return run.having(weights={"precision": precision}, parameters={"mean": mean})

    def _weights(self, run: Run) -> WeightDistribution:
        factor = positive_factor(run.parts["weights"]["precision"])
        return WeightDistribution.from_factor(factor, run.parts["parameters"]["mean"])

    def _step(self, problem: WeightSpaceProblem, rows: Tensor, run: Run) -> tuple[Tensor, Run]:
        batch, weights = self._batch(problem, rows), self._weights(run)
        loss = surrogate(batch, weights.mean, weights.root, weights.root)
        with torch.no_grad():
            # Value of log|P|, gradient of <P^-1, batch estimate of P>.
            nothing = torch.zeros_like(weights.root[:, :1])
            value = surrogate(batch, weights.mean, nothing, nothing) - weights.log_determinant
            # Before the optimiser's step.
            rate = self._rate(num_steps(run), rows, problem.num_data)
            tracked = torch.lerp(run.parts["weights"]["precision"], batch.precision(), rate)
        return loss - loss.detach() + value, run.having(weights={"precision": tracked})

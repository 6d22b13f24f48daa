"""BSGD, a biased baseline.

Chen et al. 2020, "Stochastic Gradient Descent in Correlated Settings: A Study on Gaussian Processes".
"""

import torch
from torch import Tensor

from gpy_iterative.features.base import FeatureMarginalLogLikelihood
from gpy_iterative.features.weight_space.problem import WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import WeightDistribution
from gpy_iterative.linear_solvers.cholesky import positive_factor
from gpy_iterative.training.run import Run


class MinibatchMarginalLogLikelihood(FeatureMarginalLogLikelihood):
    """Log marginal likelihood of a batch without the other data, divided by its size (BSGD).

    The optimum is biased, less for larger b. Any kernel works; `exact_value` and `posterior` need finite feature maps.
    A step costs b^3 + b^2 m, or b^3 and b^2 kernel values.

    Args:
        likelihood, model, batch_size, generator: as in `VariationalFeatureMarginalLogLikelihood`.
    """

    needs_features = False

    def _start(self, problem: WeightSpaceProblem, run: Run) -> Run:
        return run

    def _weights(self, run: Run) -> WeightDistribution:
        raise ValueError(
            "MinibatchMarginalLogLikelihood keeps no weights, so it has no bound and no gap: use "
            "VariationalFeatureMarginalLogLikelihood."
        )

    def _step(self, problem: WeightSpaceProblem, rows: Tensor, run: Run) -> tuple[Tensor, Run]:
        residual, noise = problem.residual_and_noise(rows)
        factor = positive_factor(problem.prior.covariance(rows) + torch.diag(noise))
        loss = factor.whiten(residual.unsqueeze(-1)).square().sum() + factor.logdet()
        return problem.num_data / len(rows) * loss, run

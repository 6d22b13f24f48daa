"""What `model(x)` asks in evaluation mode once a posterior is installed."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from torch import Tensor

if TYPE_CHECKING:
    from gpy_iterative.prediction.posterior import PathwisePosterior


class PathwisePredictionStrategy:
    """GPyTorch's prediction strategy interface, answered by a PathwisePosterior.

    `model(x)` then equals `posterior(x)`, through everything that is built on it (BoTorch's `model.posterior`,
    acquisition functions). GPyTorch itself evaluates the t x n block of the joint prior on the way, where
    `posterior(x)` does not. `model.train()` and `model.set_train_data` remove it, as they do with GPyTorch's own.
    """

    def __init__(self, posterior: "PathwisePosterior") -> None:
        self._posterior = posterior

    @property
    def train_shape(self) -> torch.Size:
        """Shape of one member's training targets, [n] or [n, T]."""
        return self.train_prior_dist.event_shape

    @property
    def num_train(self) -> int:
        """Training data, counted with all tasks."""
        return self.train_shape.numel()

    @property
    def train_prior_dist(self) -> MultivariateNormal:
        """The prior at the training inputs."""
        return self._posterior.solves.system.prior

    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator | Tensor, test_train_covar: LinearOperator | Tensor
    ) -> tuple[Tensor, LinearOperator]:
        """Mean [*b, t] and lazy covariance [*b, t, t] from the blocks of the joint prior that GPyTorch has made."""
        return self._posterior.condition(
            test_mean, to_linear_operator(test_test_covar), to_linear_operator(test_train_covar)
        )

    def get_fantasy_strategy(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeError with the way that works: fantasies need solves of their own."""
        raise RuntimeError(
            "An iterative posterior does not make fantasy models (get_fantasy_model, condition_on_observations). Add the "
            "observations with model.set_train_data(inputs, targets, strict=False) and predict through mll.posterior() "
            "again, or clear the posterior with model.train(); model.eval() to have GPyTorch's own, which is dense."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None, as with GPyTorch's own: a copied model computes its own predictions."""

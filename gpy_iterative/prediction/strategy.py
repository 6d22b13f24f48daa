"""What `model(x)` asks in evaluation mode once a posterior is installed."""

from typing import TYPE_CHECKING, Any

import torch
from linear_operator import LinearOperator, to_linear_operator
from torch import Tensor

from gpy_iterative.prediction.variance import TestPoints

if TYPE_CHECKING:
    from gpy_iterative.prediction.posterior import PathwisePosterior


class PathwisePredictionStrategy:
    """GPyTorch's prediction strategy interface, answered by a PathwisePosterior.

    GPyTorch hands over blocks of the joint prior but not the test inputs, so variances that would come from samples are
    solved for directly here, a column a test point; `posterior(x)` is the cheaper way to many variances.
    """

    def __init__(self, posterior: "PathwisePosterior") -> None:
        self._posterior = posterior

    @property
    def train_shape(self) -> torch.Size:
        """Of the training targets."""
        return self._posterior.model.train_targets.shape

    @property
    def num_train(self) -> int:
        """Training data, counted with all tasks."""
        return self._posterior.system.size

    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator | Tensor, test_train_covar: LinearOperator | Tensor
    ) -> tuple[Tensor, LinearOperator]:
        """Mean [*b, t] and lazy covariance [*b, t, t] from blocks of the joint prior."""
        system = self._posterior.system
        cross = to_linear_operator(test_train_covar)
        if system.observed is not None and cross.shape[-1] != system.size:
            cross = cross[..., :, system.observed.nonzero().squeeze(-1)]
        mean = test_mean + (cross @ system.weights.unsqueeze(-1)).squeeze(-1)
        at = TestPoints(to_linear_operator(test_test_covar), to_linear_operator(cross))
        return mean, self._posterior.covariance_of(at, mean)

    def get_fantasy_strategy(self, *args: Any, **kwargs: Any) -> Any:
        """Not this way: raises RuntimeError with the way that works."""
        raise RuntimeError(
            "Fantasy models of an iterative posterior are not available: call model.set_train_data(inputs, targets, "
            "strict=False) with the extended data, then mll.posterior(), whose solve starts from the old weights."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # as GPyTorch's own: a copied model computes its own predictions

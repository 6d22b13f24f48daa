"""What `model(x)` asks in evaluation mode once a posterior is installed."""

from typing import TYPE_CHECKING, Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from torch import Tensor

if TYPE_CHECKING:
    from gpy_iterative.exact.prediction.posterior import PathwisePosterior


class PathwisePredictionStrategy:
    """GPyTorch's prediction strategy interface, answered by a PathwisePosterior.

    Gradients flow to test inputs. To hyperparameters, which `posterior(x)` cuts off, only the part through the blocks of
    the joint prior flows, not the one through the solves: train with the marginal log likelihood.

    `model(x)` then equals `posterior(x)`, through everything that is built on it (BoTorch's `model.posterior`,
    acquisition functions). GPyTorch itself evaluates the t x n block of the joint prior on the way, where
    `posterior(x)` does not; and where a `GridInterpolationKernel` has no `grid_bounds`, K(x, x) is on a grid of the test
    inputs' own. `model.train()` and `model.set_train_data` remove it, as they do with GPyTorch's own.
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
        """The prior at the training inputs. GPyTorch asks for its shape before it evaluates the model's kernels."""
        prior = self._posterior.solves.system.prior
        self._posterior.forget_caches()
        return prior

    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator | Tensor, test_train_covar: LinearOperator | Tensor
    ) -> tuple[Tensor, LinearOperator]:
        """Mean [*b, t] and lazy covariance [*b, t, t] from the blocks of the joint prior that GPyTorch has made.

        Raises ValueError where GPyTorch has made them with another grid (see `GridInterpolationKernel`) than that of the
        training data.
        """
        self._posterior.check_grids()
        return self._posterior.condition(
            test_mean, to_linear_operator(test_test_covar), to_linear_operator(test_train_covar)
        )

    def get_fantasy_strategy(
        self,
        inputs: list[Tensor],
        targets: Tensor,
        full_inputs: list[Tensor],
        full_targets: Tensor,
        full_output: MultivariateNormal,
        **kwargs: Any,
    ) -> "PathwisePredictionStrategy":
        """Of the posterior with the new observations, see `PathwisePosterior.condition_on_observations`.

        What `model.get_fantasy_model` and BoTorch's `condition_on_observations` and `fantasize` ask for. The full data and
        their prior, which GPyTorch makes on the way, are not looked at.

        The fantasy model answers at the hyperparameters of now: GPyTorch does not say whose strategy this becomes, so later
        changes of that model go unnoticed. `posterior.condition_on_observations(...).model` follows its own.
        """
        return PathwisePredictionStrategy(self._posterior.with_observations(inputs, targets, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None, as with GPyTorch's own: a copied model computes its own predictions."""

"""GPyTorch's prediction strategy, for `model(x)` and what is built on it."""

from typing import TYPE_CHECKING, Any

from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from torch import Size, Tensor

if TYPE_CHECKING:
    from gpy_iterative.exact.prediction.posterior import PathwisePosterior


class PathwisePredictionStrategy:
    """GPyTorch's prediction strategy interface, answered by a PathwisePosterior.

    `model(x)` then equals `posterior(x)`, as does everything that is built on it (BoTorch's `model.posterior`), until
    `model.train()` or `model.set_train_data`. GPyTorch itself evaluates the t x n block of the joint prior on the way, and
    puts K(x, x) of a `GridInterpolationKernel` without `grid_bounds` on a grid of the test inputs' own. Gradients flow to
    test inputs, and to hyperparameters through the blocks of the joint prior only: train with the marginal log likelihood.
    """

    def __init__(self, posterior: "PathwisePosterior") -> None:
        self._posterior = posterior

    @property
    def train_shape(self) -> Size:
        """Shape of one member's training targets, [n] or [n, T]."""
        return self.train_prior_dist.event_shape

    @property
    def num_train(self) -> int:
        """The number of training targets, over all tasks."""
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

        Raises ValueError where a `GridInterpolationKernel` had another grid in them than for the training data.
        """
        self._posterior.check_grids()
        blocks = to_linear_operator(test_test_covar), to_linear_operator(test_train_covar)
        return self._posterior.condition(self._posterior.solves, test_mean, *blocks)

    def get_fantasy_strategy(
        self,
        inputs: list[Tensor],
        targets: Tensor,
        full_inputs: list[Tensor],
        full_targets: Tensor,
        full_output: MultivariateNormal,
        **kwargs: Any,
    ) -> "PathwisePredictionStrategy":
        """The strategy of the posterior with new observations, see `PathwisePosterior.condition_on_observations`.

        The full data and their prior are not used. The fantasy model answers at the hyperparameters of now: GPyTorch does
        not say whose strategy this becomes. `posterior.condition_on_observations(...).model` follows its own.
        """
        return PathwisePredictionStrategy(self._posterior.with_observations(inputs, targets, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None, as with GPyTorch's own: a copied model computes its own predictions."""

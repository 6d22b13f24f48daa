from typing import TYPE_CHECKING, Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from torch import Size, Tensor

from gpy_iterative.checks import check_autocast
from gpy_iterative.exact.prediction.joint_prior import expanded
from gpy_iterative.exact.prediction.new_observations import check_without_gradients
from gpy_iterative.linear_operators.kernel_functions import leaves_of

if TYPE_CHECKING:
    from gpy_iterative.exact.prediction.posterior import PathwisePosterior


class PathwisePredictionStrategy:
    """GPyTorch's prediction strategy for a `PathwisePosterior`.

    GPyTorch places K(x, x) of a `GridInterpolationKernel` without `grid_bounds` on another grid. Gradients are with
    respect to test inputs (none to inputs that are made of the model's own parameters only). Those with respect to
    hyperparameters are incomplete where test inputs require gradients; else there are none.
    """

    def __init__(self, posterior: "PathwisePosterior") -> None:
        self._posterior = posterior

    def __getattr__(self, name: str) -> Any:
        """AttributeError with advice, for models that read GPyTorch's caches (BoTorch's HigherOrderGP)."""
        raise AttributeError(
            f"GPyTorch's prediction strategy may have {name!r}, that of an iterative posterior has not: model.train(); "
            "model.eval() restores GPyTorch's own dense predictions."
        )

    @property
    def train_shape(self) -> Size:
        """Shape of one member's targets, [n] or [n, T]."""
        return self.train_prior_dist.event_shape

    @property
    def num_train(self) -> int:
        """The number of targets, over all tasks."""
        return self.train_shape.numel()

    @property
    def train_prior_dist(self) -> MultivariateNormal:
        """The prior at the training inputs. Clears kernels' caches: GPyTorch evaluates kernels next."""
        prior = self._posterior.solves.system.prior
        self._posterior.forget_caches()
        return prior

    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator | Tensor, test_train_covar: LinearOperator | Tensor
    ) -> tuple[Tensor, LinearOperator]:
        """Mean [*b, t] and lazy covariance [*b, t, t]. ValueError as `PathwisePosterior.check_grids`."""
        check_autocast()
        self._posterior.check_grids()
        solves, blocks = self._posterior.solves, [to_linear_operator(b) for b in (test_test_covar, test_train_covar)]
        # Outside of `torch.no_grad`, a graph of hyperparameters would hold several matrices K(x, X).
        tensors = [test_mean, *(tensor for block in blocks for tensor in block.representation())]
        own = {id(parameter) for parameter in self._posterior.model.parameters()}
        if all(id(leaf) in own for tensor in tensors for leaf in leaves_of(tensor)):
            test_mean, blocks = test_mean.detach(), [block.detach() for block in blocks]
        # Only the mean or the targets may have a batch.
        batch = torch.broadcast_shapes(solves.system.batch_shape, test_mean.shape[:-1], test_test_covar.shape[:-2])
        return self._posterior.condition(solves, test_mean, *(expanded(block, batch) for block in blocks))

    def get_fantasy_strategy(
        self,
        inputs: list[Tensor],
        targets: Tensor,
        full_inputs: list[Tensor],
        full_targets: Tensor,
        full_output: MultivariateNormal,
        **kwargs: Any,
    ) -> "PathwisePredictionStrategy":
        """See `condition_on_observations`. The fantasy model keeps the present hyperparameters.

        Gradients, also by its hyperparameters, are those of GPyTorch with `detach_test_caches`; RuntimeError for new inputs
        that require a gradient, and for such targets without this setting.
        """
        if gpytorch.settings.detach_test_caches.off():
            check_without_gradients([targets])
        return PathwisePredictionStrategy(self._posterior.with_observations(inputs, targets, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> "PathwisePredictionStrategy | None":
        """Of a posterior that is copied, too; of a model alone None, as in GPyTorch."""
        posterior = memo.get(id(self._posterior))
        return None if posterior is None else PathwisePredictionStrategy(posterior)

"""Laplace's model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP
from torch import Tensor

from gpy_iterative.checks import check_choice, check_count, check_finite, check_instance, checked_seed
from gpy_iterative.laplace.likelihoods.pointwise import PointwiseLikelihood, check_laplace_likelihood
from gpy_iterative.laplace.likelihoods.predictive import (
    LatentMarginals,
    PredictiveMethod,
    class_probabilities,
    predictive_log_probs,
)
from gpy_iterative.laplace.newton.base import LaplaceSolver
from gpy_iterative.laplace.paths import LaplaceSamplePaths
from gpy_iterative.laplace.posterior import LaplacePosterior, VarianceSplit
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress


class IterativeLaplaceGP(GP):
    """A Gaussian process with Laplace's approximation, used like `gpytorch.models.ExactGP`.

    A subclass defines `forward(x)`, the prior: a MultivariateNormal, with batch shape [C] for C latent functions, or a
    MultitaskMultivariateNormal. `model(x)` is this prior in train mode, else the latent posterior.

    Args:
        train_inputs: [n, d], or several.
        train_targets: [n], of an integer dtype for a softmax, or multitask [n, C].
        likelihood: GPyTorch's, a registered one, or any with a smooth `log_prob` that factorises over points.
        solver: None is `LaplaceCholesky()` up to n C = 2,000, else `LaplaceNewton()`.
        seed: for sample paths, Monte Carlo predictions and covariance actions.
        num_refinements: of predictions, towards the variational approximation.

    `solver`, `products`, `seed` and `num_refinements` may be changed later.

    Raises:
        UnsupportedLikelihoodError: Laplace's method does not suit the likelihood.
        ValueError: unsuitable data or options.

    Examples:
        >>> class Classifier(gpi.models.IterativeLaplaceGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpi.likelihoods.LogitBernoulliLikelihood())
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(x.new_zeros(len(x)), self.covar_module(x))
        >>> labels = (train_y > 0).long()
        >>> model = Classifier(train_x, labels)
        >>> mll = gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, generator=0)
        >>> (-mll(model(train_x), labels)).backward()
        >>> posterior = mll.posterior()
        >>> model.predict_proba(test_x).shape
        torch.Size([20])
    """

    def __init__(
        self,
        train_inputs: Tensor | Iterable[Tensor],
        train_targets: Tensor,
        likelihood: Likelihood,
        *,
        solver: LaplaceSolver | None = None,
        products: KernelProducts | None = None,
        seed: int = 0,
        num_refinements: int = 0,
    ) -> None:
        super().__init__()
        check_laplace_likelihood(likelihood)
        check_instance("solver", solver, LaplaceSolver, "LaplaceNewton()")
        check_instance("products", products, KernelProducts, "KernelProducts()")
        check_count("num_refinements", num_refinements, least=0)
        self.likelihood, self.num_refinements = likelihood, num_refinements
        self.solver, self.seed = solver, checked_seed(seed)
        self.products = KernelProducts() if products is None else products
        self.likelihood_params: LikelihoodParams | None = None
        self._posterior: LaplacePosterior | None = None
        self._posterior_options: tuple[Any, ...] = ()  # at its construction
        self.train_inputs, self.train_targets = _as_inputs(train_inputs), train_targets
        self.set_train_data()

    def set_train_data(
        self, inputs: Tensor | Iterable[Tensor] | None = None, targets: Tensor | None = None, strict: bool = False
    ) -> None:
        """Replaces the training data by data of any size, or raises ValueError and changes nothing."""
        new_inputs = self.train_inputs if inputs is None else _as_inputs(inputs)
        new_targets = self.train_targets if targets is None else targets
        if not isinstance(new_targets, Tensor):
            raise TypeError(
                f"The training targets must be a tensor, got {type(new_targets).__name__}: use torch.as_tensor(...)."
            )
        for index, x in enumerate(new_inputs):
            if x.dim() != 2:
                raise ValueError(f"The training inputs must be [n, d], got {tuple(x.shape)}: one model is one problem.")
            if new_targets.shape[:1] != x.shape[:1]:
                raise ValueError(
                    f"There are {len(x)} training inputs, and targets of shape {tuple(new_targets.shape)}: pass one "
                    "target for each input."
                )
            check_finite(f"train_inputs[{index}]", x)
        self.train_inputs, self.train_targets, self._posterior = new_inputs, new_targets, None

    def keep_params(self, params: LikelihoodParams | None) -> None:
        """Likelihood arguments for predictions."""
        is_same = params is not None and params.equals(self.likelihood_params)
        if params is not self.likelihood_params and not is_same:
            self.likelihood_params, self._posterior = params, None

    def __call__(self, *inputs: Tensor, **kwargs: Any) -> MultivariateNormal:
        if not self.training:
            return self.posterior()(*inputs)
        given = [x.unsqueeze(-1) if x.dim() == 1 else x for x in inputs]
        known = self.train_inputs
        if gpytorch.settings.debug.on() and not (len(given) == len(known) and all(map(torch.equal, known, given))):
            raise RuntimeError(
                "In training mode the model takes only its training inputs: call model.eval() to predict at others."
            )
        prior = super().__call__(*given, **kwargs)
        if not isinstance(prior, MultivariateNormal):
            raise TypeError(f"The model's forward must return a MultivariateNormal, got {type(prior).__name__}.")
        return prior

    def posterior(
        self,
        initial_weights: Tensor | None = None,
        *,
        solver: LaplaceSolver | None = None,
        products: KernelProducts | None = None,
        params: Sequence[Any] | None = None,
        progress: Progress = False,
    ) -> LaplacePosterior:
        """The posterior of evaluation mode; any argument or a change of `solver`, `products` or `seed` makes a new one.

        Args:
            initial_weights: warm start v [n, C].
            solver, products: None takes the model's.
            params: for the likelihood's `forward` at the training points; None takes the last ones.
            progress: as in `LaplaceMarginalLogLikelihood`.

        Raises as `LaplacePosterior` does.
        """
        given, options = (initial_weights, solver, products, params), (self.solver, self.products, self.seed)
        is_asked = progress is not False or any(argument is not None for argument in given)
        kept = None if is_asked or options != self._posterior_options else self._posterior
        if kept is None or kept.likelihood is not self.likelihood:
            arguments = self.likelihood_params if params is None else LikelihoodParams.given(params, self)
            kept = LaplacePosterior(
                self,
                self.likelihood,
                solver=solver or self.solver,
                products=products or self.products,
                seed=self.seed,
                initial_weights=initial_weights,
                params=() if arguments is None else arguments.current(self)[0],
                progress=progress,
                num_refinements=self.num_refinements,
            )
            self._posterior, self._posterior_options, self.likelihood_params = kept, options, arguments
        kept.num_refinements = self.num_refinements
        return kept

    def predict_proba(self, *inputs: Tensor, method: PredictiveMethod = "pairwise", num_samples: int = 1000) -> Tensor:
        """Class probabilities at test inputs [*b, t, d].

        Args:
            method: for a softmax "pairwise" (underconfident), "diagonal" (no covariances) or "mc" (samples); for all
                likelihoods "mode" (no latent variance).
            num_samples: for "mc".

        Returns:
            [*b, t] for label 1 of Bernoulli likelihoods, [*b, t, classes] for a softmax.

        Raises:
            UnsupportedLikelihoodError: a likelihood without classes.
            ValueError: unsuitable inputs, an unknown method.
        """
        check_choice("method", method, get_args(PredictiveMethod))
        mean, covariance = self.posterior().moments(*inputs)
        points = mean.flatten(0, -2), covariance.flatten(0, -3)
        with torch.no_grad():
            latent = LatentMarginals(*points, method, num_samples, self._generator())
            probabilities = class_probabilities(self.likelihood, latent)
        shape = (*mean.shape[:-1], *probabilities.shape[1:])
        return probabilities.view(shape).to(self._dtype)

    def predictive_log_prob(
        self,
        *inputs_and_targets: Tensor,
        method: PredictiveMethod = "pairwise",
        num_samples: int = 1000,
        params: Sequence[Any] = (),
    ) -> Tensor:
        """Log p(y | x, data) [t], by closed forms or quadrature where possible, else samples.

        Args:
            inputs_and_targets: test inputs [t, d], then targets [t].
            method, num_samples: see `predict_proba`.
            params: for the likelihood's `forward` at the test points.

        Raises:
            ValueError: inputs or targets that do not fit, targets outside the support.
            TypeError: targets that are no tensor.
        """
        check_choice("method", method, get_args(PredictiveMethod))
        *inputs, targets = inputs_and_targets
        mean, covariance = self.posterior().moments(*inputs)
        likelihood = PointwiseLikelihood(self.likelihood, targets, mean.shape[-1], params)
        if mean.dim() != 2 or targets.shape[:1] != mean.shape[:1]:
            raise ValueError(
                f"predictive_log_prob takes inputs [t, d] and targets [t]; got targets {tuple(targets.shape)} for "
                f"{tuple(mean.shape[:-1])} points."
            )
        latent = LatentMarginals(mean, covariance, method, num_samples, self._generator())
        with torch.no_grad():
            return predictive_log_probs(likelihood, latent).to(self._dtype)

    def posterior_variance(self, *inputs: Tensor) -> VarianceSplit:
        """See `LaplacePosterior.split_variance`."""
        return self.posterior().split_variance(*inputs)

    def sample_paths(self, num_paths: int, *, num_frequencies: int = 4096) -> LaplaceSamplePaths:
        """See `LaplacePosterior.sample_paths`."""
        return self.posterior().sample_paths(num_paths, num_frequencies=num_frequencies)

    @property
    def _dtype(self) -> torch.dtype:
        dtype = self.train_inputs[0].dtype
        return dtype if dtype.is_floating_point else torch.get_default_dtype()

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "IterativeLaplaceGP":
        self.train_inputs, self.train_targets = tuple(map(fn, self.train_inputs)), fn(self.train_targets)
        if self.likelihood_params is not None:
            self.likelihood_params.apply(fn)
        self._posterior = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_posterior": None}


def _as_inputs(inputs: Tensor | Iterable[Tensor] | None) -> tuple[Tensor, ...]:
    given = (inputs,) if isinstance(inputs, Tensor | None) else tuple(inputs)
    if not given or not all(isinstance(x, Tensor) for x in given):
        kinds = ", ".join({type(x).__name__ for x in given}) or "nothing"
        raise TypeError(
            f"The training inputs must be a tensor, or several of them, got {kinds}: use torch.as_tensor(...)."
        )
    return tuple(x.unsqueeze(-1) if x.dim() == 1 else x for x in given)

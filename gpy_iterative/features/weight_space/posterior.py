"""Predictions from the weights."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count, checked_seed
from gpy_iterative.exact.prediction.joint_prior import checked_inputs, graph_for
from gpy_iterative.exact.validation import check_likelihood
from gpy_iterative.features.weight_space.problem import WeightSpacePrior, WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import WeightDistribution, exact_statistics
from gpy_iterative.linear_operators.predicted import RootCovarianceLinearOperator
from gpy_iterative.random_numbers import normal
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, check_progress
from gpy_iterative.training.report import Report
from gpy_iterative.training.snapshot import ModelSnapshot, OwnLock
from gpy_iterative.training.training_system import check_has_data, check_order, prior_at


@dataclass(frozen=True)
class PassReport(Report):
    """Of one pass."""

    num_data: int
    num_features: int
    seconds: float


class WeightSpacePosterior:
    """`posterior(x)` is the exact latent posterior at x; `likelihood(posterior(x))` adds the noise.

    A pass over the training data costs n m^2, t test points t m^2. Changed hyperparameters or data cause another pass.

    Args:
        model: an ExactGP with training data and finite feature maps.
        likelihood: Gaussian, with independent noise.
        params, kwargs: the likelihood's arguments at the training data.
        seed: of the sample paths.
        progress: True shows a bar, a callable gets every `ProgressReport`.

    Attributes:
        report: of the last pass.

    Raises:
        ValueError: unsuitable data, or no finite feature map.
        NonFiniteError: hyperparameters or features are not finite.
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
    """

    def __init__(
        self,
        model: ExactGP,
        likelihood: Likelihood,
        *,
        params: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        progress: Progress = False,
    ) -> None:
        check_order(model, likelihood)
        check_likelihood(likelihood, model, type(self).__name__)
        check_progress(progress)
        self.model, self.likelihood = model, likelihood
        self._params = LikelihoodParams(params, model, kwargs)
        self._seed, self._progress = checked_seed(seed), progress
        self._lock = OwnLock()
        self._snapshot, self._weights, self.report = self._solved()

    def _current(self) -> tuple[ModelSnapshot, WeightDistribution]:
        with self._lock:
            if not self._snapshot.describes(self.model, self.likelihood):
                self._snapshot, self._weights, self.report = self._solved()
            return self._snapshot, self._weights

    def __call__(self, *inputs: Tensor) -> MultivariateNormal:
        """The latent posterior at [*b, t, d]; only inputs receive gradients. Raises ValueError for unsuitable inputs."""
        snapshot, weights = self._current()
        model = snapshot.model_copy()
        points = checked_inputs(model.train_inputs, inputs)
        with graph_for(inputs):
            prior = prior_at(model, points)
            weight_space = WeightSpacePrior(prior)
            basis, jitter = weight_space.features().basis.double(), weight_space.jitter
            mean = prior.loc + (basis @ weights.mean.unsqueeze(-1)).squeeze(-1).to(prior.loc)
            covariance = RootCovarianceLinearOperator((basis @ weights.root).to(prior.loc))
            return MultivariateNormal(mean, covariance if jitter is None else covariance + DiagLinearOperator(jitter))

    def sample_paths(self, num_paths: int) -> "WeightSpacePaths":
        """Posterior functions, m^2 each; more paths keep the first ones."""
        check_count("num_paths", num_paths)
        snapshot, weights = self._current()
        generator = torch.Generator().manual_seed(self._seed)
        # One draw for all would change the first paths.
        draws = [normal(weights.mean.shape, generator, weights.root.device) for _ in range(num_paths)]
        with torch.inference_mode(False), torch.no_grad():  # differentiable later
            samples = weights.mean.unsqueeze(-1) + weights.root @ torch.stack(draws, dim=-1)
            return WeightSpacePaths(snapshot, samples)

    @torch.inference_mode(False)  # for later gradients
    @torch.no_grad()
    def _solved(self) -> tuple[ModelSnapshot, WeightDistribution, PassReport]:
        start = time.perf_counter()
        model, likelihood = self.model, self.likelihood
        check_has_data(model)
        snapshot = ModelSnapshot.of(model, likelihood)
        model, likelihood = snapshot.model, snapshot.likelihood
        prior = prior_at(model, list(model.train_inputs))
        params, kwargs = self._params.current(model)
        problem = WeightSpaceProblem(likelihood, prior, model.train_targets, params, kwargs, progress=self._progress)
        weights = WeightDistribution.from_precision(*exact_statistics(problem))
        snapshot.hand_back(self.model, self.likelihood)
        report = PassReport(problem.num_data, len(weights.mean), time.perf_counter() - start)
        return snapshot, weights, report


class WeightSpacePaths:
    """Functions m(x) + u(x)^T v_j for weights v_j [m], differentiable in x."""

    def __init__(self, snapshot: ModelSnapshot, samples: Tensor) -> None:
        self._snapshot, self._samples = snapshot, samples

    @property
    def num_paths(self) -> int:
        """Number of functions, k."""
        return self._samples.shape[-1]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """[k, *b, t] at inputs [*b, t, d]."""
        model = self._snapshot.model_copy()
        points = checked_inputs(model.train_inputs, inputs)
        with graph_for(inputs):
            prior = prior_at(model, points)
            basis = WeightSpacePrior(prior).features().basis.double()
            values = prior.loc.unsqueeze(-1) + (basis @ self._samples).to(prior.loc)
        return values.movedim(-1, 0)

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator import LinearOperator
from linear_operator.operators import LowRankRootAddedDiagLinearOperator, ZeroLinearOperator
from torch import Tensor

from gpy_iterative.checks import check_count, check_instance, check_number, generator_or_seed
from gpy_iterative.exact.prediction.blocks import converted, product, scatter_rows
from gpy_iterative.exact.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.exact.prediction.joint_prior import (
    checked_inputs,
    graph_for,
    joint_prior,
    rounded_as_all_data,
)
from gpy_iterative.exact.prediction.new_observations import (
    check_observations,
    check_without_gradients,
    with_observations,
)
from gpy_iterative.exact.prediction.projection import ProjectionRecipe
from gpy_iterative.exact.prediction.sample_paths import SamplePaths
from gpy_iterative.exact.prediction.strategy import PathwisePredictionStrategy
from gpy_iterative.exact.prediction.training_solves import PriorDraws, TrainingSolves
from gpy_iterative.exact.prediction.variance_error import VarianceError, solved_variance
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.linear_solvers.cholesky import Cholesky
from gpy_iterative.linear_solvers.default import default_solver
from gpy_iterative.random_numbers import integers, permutation
from gpy_iterative.training.likelihood_params import LikelihoodParams
from gpy_iterative.training.progress import Progress, check_progress
from gpy_iterative.training.report import SolveReport
from gpy_iterative.training.snapshot import ModelSnapshot, OwnLock, evaluation_copies
from gpy_iterative.training.training_system import check_gaussian, check_order, training_system

logger = logging.getLogger(__name__)

#: Nats, see `TrainingSystem.suited`.
ROUNDING_IN_PREDICTIONS = 0.1
#: Up to this size factor and triangular solves cost no more than projections.
EXACT_VARIANCES_BELOW = 6000


class PathwisePosterior:
    """`posterior(x)` is the latent posterior at x; `likelihood(posterior(x))` adds the noise.

    Construction solves for the mean. Variances are exact up to `exact_below` data; else those of the best predictor from
    `rank` projections of the data and `num_neighbours` observations per point, never below the exact ones. They cost once
    `rank` kernel rows, one product with `rank` columns, n rank^2 multiply-adds, and 4 to 12 products for a check of eight.

    Changes of hyperparameters, data, dtype, device or a module's public numbers and strings (Matern's `nu`) cause one solve
    from the old weights. Calls are thread-safe, except with a module that only a closure holds.

    Args:
        solver: None is Cholesky up to `exact_below`, then `gpy_iterative.solvers.default_solver`, with a residual of at
            most .01 standard deviations of the noise per datum, as far as rounding allows.
        products, progress: as in `HutchinsonMarginalLogLikelihood`.
        generator: a generator or a seed for all draws; None is seed 0.
        params, kwargs: the likelihood's arguments, as in training; training inputs among them are updated.
        initial_weights: [*b, n], start of the solve.
        rank: None is 1,024, or 64 to 256 with a far field.
        num_neighbours: None is 128, or none where the noise hides what the projections do not explain.
        num_frequencies: per kernel term, for sample paths.
        exact_below: largest n with variances from a Cholesky factor; for a batch of b, n b^1/2.

    Raises:
        ValueError, TypeError: invalid options, NaN in data, wrong shapes.
        NonFiniteError, NotPositiveDefiniteError: from the solver.

    Warns:
        ConvergenceWarning: a solve missed its tolerance, that of the default solver by more than rounding, or
            than .01 standard deviations of the noise per datum from a far field.
        VarianceWarning: the first variances are more than 10% too large (median).

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> posterior = gpi.prediction.PathwisePosterior(model, likelihood)
        >>> likelihood(posterior(test_x)).variance.shape
        torch.Size([20])
        >>> path = posterior.sample_paths(1)
        >>> torch.equal(path(test_x[:5]), path(test_x[:5]))  # a function
        True
    """

    def __init__(
        self,
        model: ExactGP,
        likelihood: Likelihood,
        *,
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
        params: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        initial_weights: Tensor | None = None,
        rank: int | None = None,
        num_neighbours: int | None = None,
        num_frequencies: int = 8192,
        exact_below: int = EXACT_VARIANCES_BELOW,
        progress: Progress = False,
    ) -> None:
        check_order(model, likelihood)
        check_gaussian(likelihood, type(self).__name__)
        check_count("num_frequencies", num_frequencies)
        check_progress(progress)
        check_instance("solver", solver, Solver, "ConjugateGradients()")
        check_instance("products", products, KernelProducts, "KernelProducts()")
        check_instance("kwargs", kwargs, Mapping, "{'noise': noise}")
        check_instance("initial_weights", initial_weights, Tensor, "torch.zeros(n)")
        check_number("exact_below", exact_below, "not be negative", lambda number: number >= 0)
        self._model, self.likelihood = model, likelihood
        self._installs_when_asked = False
        self._solver, self._params = solver, LikelihoodParams(params, model, kwargs=kwargs)
        self._products = KernelProducts() if products is None else products
        self._recipe = ProjectionRecipe(rank=rank, num_neighbours=num_neighbours)
        self._num_frequencies, self._exact_below = num_frequencies, exact_below
        generator = generator_or_seed(generator)
        if isinstance(generator, torch.Generator):  # its only draw
            generator = int(integers(2**62, (), generator))
        self._seed, self._progress = generator or 0, progress
        self._lock = OwnLock()
        self._snapshot, self._solves = self._solved(initial_weights)

    @property
    def model(self) -> ExactGP:
        """After `condition_on_observations`, the first access installs the posterior."""
        if self._installs_when_asked:
            self.install()
        return self._model

    def install(self) -> None:
        """Puts model and likelihood into evaluation mode; `model(x)` uses this posterior until `model.train()`."""
        self._installs_when_asked = False
        self._model.eval()
        self.likelihood.eval()
        self._model.prediction_strategy = PathwisePredictionStrategy(self)

    def refresh(self) -> None:
        """Solves again, from the old weights, if anything has changed."""
        self._current()

    @property
    def solves(self) -> TrainingSolves:
        """The solves at the current hyperparameters and data."""
        return self._current()[1]

    def _current(self) -> tuple[ModelSnapshot, TrainingSolves]:
        with self._lock:
            if not self._snapshot.describes(self._model, self.likelihood):
                self._snapshot, self._solves = self._solved(self._solves.start, self._solves.draws)
            return self._snapshot, self._solves

    def forget_caches(self) -> None:
        """Clears the matrices of old hyperparameters that kernels keep."""
        if self._has_stale_caches:
            for module in self._model.modules():
                if isinstance(module, Kernel):
                    module._clear_cache()
            self._has_stale_caches = False

    def check_grids(self) -> None:
        """ValueError where a kernel without `grid_bounds` has another grid than in training."""
        self._current()[0].check_grids(self._model)

    def __call__(self, *inputs: Tensor) -> MultivariateNormal:
        """The latent posterior at test inputs [*b, t, d], one tensor for each of the model's inputs.

        Gradients flow only to the inputs. ValueError for inputs that are not finite or do not fit the training inputs.
        """
        snapshot, solves = self._current()
        with graph_for(inputs):
            joint = joint_prior(snapshot.model_copy(), inputs, solves.system.batch_shape, self._products)
            return joint.distribution(*self.condition(solves, joint.mean, joint.test_test, joint.test_train))

    def condition(
        self, solves: TrainingSolves, mean: Tensor, test_test: LinearOperator, test_train: LinearOperator
    ) -> tuple[Tensor, LinearOperator]:
        """Mean [*b, t] and lazy covariance [*b, t, t] from blocks of the joint prior."""
        update = product(test_train, solves.weights.unsqueeze(-1)).squeeze(-1).to(mean.dtype)
        mean = mean + update.reshape(*torch.broadcast_shapes(mean.shape, test_test.shape[:-1]))
        if gpytorch.settings.skip_posterior_variances.on():
            return mean, ZeroLinearOperator(*test_test.shape, dtype=mean.dtype, device=mean.device)
        if isinstance(test_train, LowRankRootAddedDiagLinearOperator):
            # K(X, X) of an InducingPointKernel: variances at data are those of its features, as in GPyTorch.
            test_train = test_train._linear_op
        covariance = PosteriorCovarianceLinearOperator(test_test, test_train, source=solves, progress=self._progress)
        return mean, covariance

    def sample_paths(self, num_paths: int) -> SamplePaths:
        """Posterior samples as functions: `paths(x)` is [num_paths, *b, t]; more begin with the same functions.

        Paths share `num_frequencies` frequencies. Given these, their variance differs from the posterior's by about 1% for
        RBF, 2% for rational quadratic and 3% for Matern kernels (median of the points), at single points in 8 dimensions by
        up to 20%.

        Cost: one solve with a column per new function.

        Raises:
            SpectralDensityMissingError: the kernel has no random features (register its spectral density), noise is
                correlated between tasks, or some tasks of a row are missing. Use `posterior(x).rsample()`.
        """
        check_count("num_paths", num_paths)
        snapshot, solves = self._current()
        draws = solves.prior_draws(num_paths)
        # Later calls may need gradients.
        with torch.inference_mode(False), torch.no_grad():
            solutions = draws.solutions[..., :num_paths]
            update = solves.weights.unsqueeze(-1) - scatter_rows(solutions, solves.system.observed)
        return SamplePaths(snapshot, solves.features, draws.draws, update, self._products)

    def variance_error(self, *inputs: Tensor, num_points: int = 32) -> VarianceError:
        """The error of latent variances at `num_points` random test inputs of [*b, t, d].

        Cost: one solve with num_points columns. VarianceWarning if the median |log ratio| is above .1.
        """
        snapshot, solves = self._current()
        points = checked_inputs(snapshot.model.train_inputs, inputs)
        if not solves.system.batch_shape:
            points = [x.reshape(-1, x.shape[-1]) for x in points]
        generator = torch.Generator().manual_seed(self._seed)
        chosen = permutation(points[0].shape[-2], generator)[:num_points]
        points = [x[..., chosen.to(x.device), :] for x in points]
        solves.is_checked = True
        with torch.no_grad():
            joint = joint_prior(snapshot.model_copy(), points, solves.system.batch_shape, self._products)
            _, covariance = self.condition(solves, joint.mean, joint.test_test, joint.test_train)
            test_test, test_train = (converted(b, solves.weights.dtype) for b in (joint.test_test, joint.test_train))
            prior_variance = test_test.diagonal(dim1=-2, dim2=-1)
            exact = solved_variance(solves.system, solves.projection(), prior_variance, test_train.to_dense())
            error = VarianceError.between(covariance.diagonal(dim1=-2, dim2=-1), exact)
        solves.warn_of(error)
        return error

    def condition_on_observations(
        self, inputs: Tensor | Sequence[Tensor], targets: Tensor, *, noise: Tensor | None = None
    ) -> "PathwisePosterior":
        """A new posterior with m further observations, and copies of model and likelihood, at the same hyperparameters.

        It extends solves and sample paths. Cost: n^2 multiply-adds per new observation where H is factored; else two
        products per 1,024 and, for many, a part of a solve.

        Args:
            inputs: [*b, m, d], one tensor or one for each of the model's inputs.
            targets: [*f, m] or [*f, m, T]. A batch gives a batch of posteriors; at the same inputs they share a matrix.
                A NaN target in one member (see `observation_nan_policy`) is missing in all.
            noise: [*f, m], variances, for a likelihood with fixed noise.

        Raises:
            ValueError: wrong shapes, dtypes or devices; non-finite numbers; missing noise; a BoTorch model with an
                `input_transform` (use the model's `condition_on_observations`).
            TypeError: arrays or lists.
            RuntimeError: tensors that require gradients.
        """
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        given = [*inputs, targets] if noise is None else [*inputs, targets, noise]
        check_observations(self._model, given)
        return self.with_observations(inputs, targets, noise)

    def with_observations(
        self, inputs: Sequence[Tensor], targets: Tensor, noise: Tensor | None = None
    ) -> "PathwisePosterior":
        """`condition_on_observations` for transformed inputs; detaches targets and noise (BoTorch's have a graph)."""
        check_without_gradients(inputs)
        # Later calls may need gradients.
        with torch.inference_mode(False), torch.no_grad(), self._lock:
            _, solves = self._current()
            event_dims = len(solves.system.prior.event_shape)
            posterior = copy.copy(self)
            posterior._lock = OwnLock()
            posterior._model, posterior.likelihood = with_observations(
                *evaluation_copies(self._model, self.likelihood), event_dims, inputs, targets, noise
            )
            posterior._params = self._params.moved_to(posterior._model)
            posterior._snapshot, posterior._solves = posterior._solved(known=solves)
        # Installed, it forms a reference cycle with its model: many updates would fill the memory.
        posterior._installs_when_asked = True
        return posterior

    @property
    def report(self) -> SolveReport:
        """The report of the current solve for the mean."""
        status, stats = self.solves.status, self.solves.stats
        residual = max(stats.residual_norms.values(), default=0.0)
        return SolveReport(status, stats.iterations, stats.epochs, stats.overhead, residual, stats.seconds)

    @torch.inference_mode(False)  # later calls may need gradients
    @torch.no_grad()
    def _solved(
        self,
        initial_weights: Tensor | None = None,
        draws: PriorDraws | None = None,
        known: TrainingSolves | None = None,
    ) -> tuple[ModelSnapshot, TrainingSolves]:
        snapshot = ModelSnapshot.of(self._model, self.likelihood)
        model, likelihood = snapshot.model, snapshot.likelihood
        params, kwargs = self._params.current(model)
        system = rounded_as_all_data(training_system(model, likelihood, params, self._products, kwargs), self._products)
        # Factors of a batch count together.
        is_small = system.operator.shape.numel() <= self._exact_below**2
        is_exact = is_small or isinstance(self._solver or default_solver(system.operator), Cholesky)
        was_in_float64 = known is not None and known.system.operator.dtype == torch.float64
        system = system.suited(ROUNDING_IN_PREDICTIONS, in_float64=was_in_float64 or is_exact)
        solves = TrainingSolves(
            system,
            self._solver or (Cholesky() if is_exact else None),
            recipe=self._recipe,
            is_exact=is_exact,
            num_frequencies=self._num_frequencies,
            seed=self._seed,
            initial_weights=initial_weights,
            draws=draws,
            known=known,
            progress=self._progress,
        )
        snapshot.hand_back(self._model, self.likelihood)
        self._has_stale_caches = True
        logger.info("posterior of %d data: %s", system.operator.shape[-1], solves.stats)
        return snapshot, solves

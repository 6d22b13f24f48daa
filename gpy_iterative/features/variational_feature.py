"""Mini-batches for kernels with finitely many features: a bound on the marginal likelihood that is tight at its optimum.

The log-determinant is a minimum, log|F| = min_S tr(S F) - log|S| - m. Put in, the weights' mean and covariance are
minimised over together with the hyperparameters.
"""

from collections.abc import Callable
from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.checks import check_flag
from gpy_iterative.features.base import FeatureMarginalLogLikelihood, num_steps
from gpy_iterative.features.weight_space.problem import FeatureBatch, WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import (
    TrackerRate,
    WeightDistribution,
    exact_statistics,
    surrogate,
    triangular_root,
)
from gpy_iterative.training.run import Run


class VariationalFeatureMarginalLogLikelihood(FeatureMarginalLogLikelihood):
    """An unbiased mini-batch estimate of a lower bound on the marginal likelihood, whose maximum is the exact one's.

    The bound takes weights N(v, S) for their posterior. Where they are the posterior, it equals the log marginal likelihood
    and has the same gradient for every hyperparameter. `gap()` measures how far the weights are behind.

    Args:
        likelihood: Gaussian, with independent noise: homoskedastic, fixed or heteroskedastic.
        model: a `gpytorch.models.ExactGP` with one output, whose kernels have finite feature maps (`kernels.feature_map`).
        batch_size: rows a step; None is 256, or all data where there are fewer.
        update: how the weights follow. "natural": moving averages of the precision's and the moment's batch estimates,
            which are natural gradient steps; no parameters, m^3 a step. "gradient": the mean v and a triangular root L of S
            are parameters of this module, to be trained with the others (`Adam(mll.parameters())`); b m^2 a step.
        tracker_rate: step size in (0, 1] of the natural update, or a function of the step's number (from 0); None is
            min(.05, .1 b / m), falling with the square root of the steps to .001. Deep kernels with little noise
            gain from .2.
        include_batch: whether the weights of an estimate know its batch, with half of the share that it has in the averages
            of the next step, which lets them follow a network. The bias is of second order in the rate. Off, value and
            gradient are exactly unbiased for any weights, as with update="gradient".
        centred: whether weights are those of the features before scaling (by outputscales, a LinearKernel's variances).
            Off, scales and weights have to follow each other, which is slow with update="gradient".
        generator: a generator, or the seed of one. The global generator is never touched.

    The first call, and `refresh()`, make one pass over the data, n m^2. After it a step costs b features, b m^2, and m^3
    (natural), independent of n; memory m^2 + b m. State and m x m algebra are in float64, whatever the data's dtype.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError: an option outside its range, a kernel without a finite feature map.

    A step moves the state: line searches and L-BFGS, which call several times a step, are not for this objective.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> model.covar_module = gpytorch.kernels.LinearKernel()
        >>> mll = gpi.mlls.VariationalFeatureMarginalLogLikelihood(likelihood, model, batch_size=10, generator=0)
        >>> (-mll(model(train_x), train_y)).backward()  # evaluates ten rows
        >>> mll.posterior()(test_x).mean.shape
        torch.Size([20])
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        batch_size: int | None = None,
        update: Literal["natural", "gradient"] = "natural",
        tracker_rate: float | Callable[[int], float] | None = None,
        include_batch: bool = True,
        centred: bool = True,
        generator: torch.Generator | int | None = None,
    ) -> None:
        if update not in ("natural", "gradient"):
            raise ValueError(f"update must be 'natural' or 'gradient', got {update!r}.")
        if update == "gradient" and tracker_rate is not None:
            raise ValueError(
                "tracker_rate is an option of update='natural'; with 'gradient' the optimiser has the rate."
            )
        check_flag("include_batch", include_batch)
        check_flag("centred", centred)
        super().__init__(
            likelihood,
            model,
            batch_size=batch_size,
            generator=generator,
            options={
                "update": update,
                "tracker_rate": tracker_rate,
                "include_batch": include_batch,
                "centred": centred,
            },
        )
        self.update, self.include_batch, self.centred = update, include_batch, centred
        zeros, identity = self._blank_state()
        if update == "natural":
            self.tracker_rate = TrackerRate.of(tracker_rate, self._current_batch_size(), self.num_features)
            self._run = self._run.having(weights={"precision": identity, "moment": zeros})
        else:
            self.mean = torch.nn.Parameter(zeros)
            # L below its diagonal, and the logarithm of its diagonal there: positive whatever the optimiser does.
            self.raw_root = torch.nn.Parameter(torch.zeros_like(identity))

    def _start(self, problem: WeightSpaceProblem, run: Run) -> Run:
        precision, moment = exact_statistics(problem, centred=self.centred)
        if self.update == "natural":
            return run.having(weights={"precision": precision, "moment": moment})
        weights = WeightDistribution.from_precision(precision, moment)
        root = triangular_root(weights.root @ weights.root.mT)
        raw_root = root.tril(-1) + torch.diag(root.diagonal().log())
        return run.having(parameters={"mean": weights.mean, "raw_root": raw_root})

    def _weights(self, run: Run) -> WeightDistribution:
        if self.update == "natural":
            return WeightDistribution.from_precision(**run.parts["weights"])
        raw_root = run.parts["parameters"]["raw_root"]
        logarithms = raw_root.diagonal()
        root = raw_root.tril(-1) + torch.diag(logarithms.exp())
        return WeightDistribution(run.parts["parameters"]["mean"], root, 2 * logarithms.sum())

    def _step(self, problem: WeightSpaceProblem, rows: Tensor, run: Run) -> tuple[Tensor, Run]:
        batch = self._batch(problem, rows)
        after = self._tracked(run, batch) if self.update == "natural" and self._trains() else run
        weights = self._weights(_halfway(run, after) if self.include_batch else run)
        loss = surrogate(batch, weights.mean, weights.root, weights.root) - weights.log_determinant - self.num_features
        return loss, after

    @torch.no_grad()
    def _tracked(self, run: Run, batch: FeatureBatch) -> Run:
        rate, weights = self.tracker_rate(num_steps(run)), run.parts["weights"]
        precision = torch.lerp(weights["precision"], batch.precision(), rate)
        return run.having(
            weights={"precision": precision, "moment": torch.lerp(weights["moment"], batch.moment(), rate)}
        )


def _halfway(run: Run, after: Run) -> Run:
    """A run whose weights know half of the batch's share: see `include_batch`."""
    later = after.parts["weights"]
    return run.having(weights={name: (tensor + later[name]) / 2 for name, tensor in run.parts["weights"].items()})

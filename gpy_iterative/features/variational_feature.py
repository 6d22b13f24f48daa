"""Mini-batch bound, from log|F| = min_S tr(S F) - log|S| - m."""

from collections.abc import Callable
from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.checks import check_choice, check_flag
from gpy_iterative.features.base import FeatureMarginalLogLikelihood, num_steps
from gpy_iterative.features.weight_space.problem import FeatureBatch, WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import TrackerRate, WeightDistribution, exact_statistics, surrogate
from gpy_iterative.linear_solvers.cholesky import positive_factor
from gpy_iterative.training.run import Run


class VariationalFeatureMarginalLogLikelihood(FeatureMarginalLogLikelihood):
    """Mini-batch estimate of a lower bound on the log marginal likelihood with the same maximum.

    At the posterior of the weights N(v, S), value and hyperparameter gradient are exact; `gap()` measures the distance.
    Every training call moves the state: L-BFGS does not work.

    Args:
        likelihood: Gaussian with independent noise.
        model: an ExactGP with one output and finite feature maps.
        batch_size: rows per step; None is 256, or all data if fewer.
        update: "natural" takes natural gradient steps. With "gradient", v and a root of S are parameters: train with
            `Adam(mll.parameters())`.
        tracker_rate: natural step size in (0, 1], or a function of the step; None falls from min(.05, .1 b / m) to .001
            with the square root of the steps, times the part of a batch in its rows, and is 1 for a batch of all data.
        include_batch: natural weights see half of a batch before its loss is computed, so that they follow a network; the
            bias is small. False is unbiased.
        centred: weights of features before scaling (by outputscales). False is slow with update="gradient".
        generator: a generator or a seed; None takes that of `torch.manual_seed`.

    The first call and `refresh()` cost n m^2, a step b features, b m^2, and m^3 (natural); memory m^2 + b m.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError: an option is out of range, or the kernel has no finite feature map.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> model.covar_module = gpytorch.kernels.LinearKernel()
        >>> mll = gpi.mlls.VariationalFeatureMarginalLogLikelihood(likelihood, model, batch_size=10, generator=0)
        >>> (-mll(model(train_x), train_y)).backward()  # evaluates ten rows
        >>> mll.posterior()(test_x).mean.shape
        torch.Size([20])
    """

    _described = (*FeatureMarginalLogLikelihood._described, "update", "tracker_rate", "include_batch", "centred")

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
        check_choice("update", update, ("natural", "gradient"))
        if update == "gradient" and tracker_rate is not None:
            raise ValueError(
                "tracker_rate is an option of update='natural'; with 'gradient' the optimiser has the rate."
            )
        check_flag("include_batch", include_batch)
        check_flag("centred", centred)
        super().__init__(likelihood, model, batch_size=batch_size, generator=generator)
        self.update, self.tracker_rate, self.include_batch, self.centred = update, tracker_rate, include_batch, centred
        zeros, identity = self._blank_state()
        if update == "natural":
            self._rate = TrackerRate(tracker_rate, self._current_batch_size(), self.num_features)
            self._run = self._run.having(weights={"precision": identity, "moment": zeros})
        else:
            self.mean = torch.nn.Parameter(zeros)
            # With the logarithm of its diagonal, which stays positive.
            self.raw_root = torch.nn.Parameter(torch.zeros_like(identity))

    def _start(self, problem: WeightSpaceProblem, run: Run) -> Run:
        precision, moment = exact_statistics(problem, centred=self.centred)
        if self.update == "natural":
            return run.having(weights={"precision": precision, "moment": moment})
        weights = WeightDistribution.from_precision(precision, moment)
        root = positive_factor(weights.root @ weights.root.mT).lower
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
        is_tracked = self.update == "natural" and self._trains()
        after = self._tracked(run, batch, self._rate(num_steps(run), rows, problem.num_data)) if is_tracked else run
        weights = self._weights(_halfway(run, after) if self.include_batch else run)
        loss = surrogate(batch, weights.mean, weights.root, weights.root) - weights.log_determinant - self.num_features
        return loss, after

    @torch.no_grad()
    def _tracked(self, run: Run, batch: FeatureBatch, rate: float) -> Run:
        weights = run.parts["weights"]
        precision = torch.lerp(weights["precision"], batch.precision(), rate)
        return run.having(
            weights={"precision": precision, "moment": torch.lerp(weights["moment"], batch.moment(), rate)}
        )


def _halfway(run: Run, after: Run) -> Run:
    later = after.parts["weights"]
    return run.having(weights={name: (tensor + later[name]) / 2 for name, tensor in run.parts["weights"].items()})

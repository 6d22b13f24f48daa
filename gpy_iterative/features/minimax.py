"""A penalised minimax problem.

Shoham and Avron, "Unbiased Stochastic Optimization for Gaussian Processes on Finite Dimensional RKHS", sections 3 and 4.1.
"""

import math
from numbers import Real
from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.errors import BiasWarning, warn
from gpy_iterative.features.base import FeatureMarginalLogLikelihood
from gpy_iterative.features.weight_space.problem import WeightSpaceProblem
from gpy_iterative.features.weight_space.weights import WeightDistribution, exact_statistics, surrogate
from gpy_iterative.linear_solvers.cholesky import positive_factor
from gpy_iterative.training.run import NO_ROWS, Run, next_rows
from gpy_iterative.worker_threads import CPU

#: The last step's projection and ascent.
DUE, DONE = {"is_due": torch.tensor(True, device=CPU)}, {"is_due": torch.tensor(False, device=CPU)}
#: mu="auto" over the least mu with an exact saddle point.
MARGIN = 1.2
#: Step along (A - P) / |A|.
DUAL_STEP = 0.5


class MinimaxMarginalLogLikelihood(FeatureMarginalLogLikelihood):
    """Marginal likelihood by stochastic gradient descent and ascent.

    A matrix A replaces the weights' posterior precision P in log|P|, with the penalty mu |A - P| / |A| (Frobenius norms),
    the maximum over |B| <= 1 of mu <B, A - P> / |A|. Weights and A are parameters: train with `Adam(mll.parameters())`.

    Args:
        likelihood, model, batch_size, generator: as in `VariationalFeatureMarginalLogLikelihood`.
        mu: "auto" is 1.2 |P| |P^-1| at every refresh; above |P| |P^-1| >= m the saddle point is exact. The paper has 1.

    A step takes two batches and an m x m eigendecomposition. Unlike in the paper, A and B start at the saddle point, P is
    divided by the noise, and A by the first P's mean diagonal.

    Warns:
        BiasWarning: mu is below m.
    """

    _described = (*FeatureMarginalLogLikelihood._described, "mu")

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        batch_size: int | None = None,
        mu: float | Literal["auto"] = "auto",
        generator: torch.Generator | int | None = None,
    ) -> None:
        is_number = isinstance(mu, Real) and not isinstance(mu, bool)
        if mu != "auto" and not (is_number and 0 < mu < math.inf):
            raise ValueError(f"mu must be positive and finite, or 'auto', got {mu!r}.")
        super().__init__(likelihood, model, batch_size=batch_size, generator=generator)
        if mu != "auto" and mu < self.num_features:
            warn(
                f"With mu = {mu} below the number of features, {self.num_features}, the optimum is not that of the "
                "marginal likelihood: take mu='auto', or VariationalFeatureMarginalLogLikelihood.",
                BiasWarning,
            )
        self.mu = mu
        zeros, identity = self._blank_state()
        self.mean = torch.nn.Parameter(zeros)
        self.auxiliary = torch.nn.Parameter(identity)  # A over `scale`
        one = torch.ones_like(zeros[0])
        weights = {"dual": torch.zeros_like(identity), "scale": one, "strength": one}  # B, units of A, mu
        self._run = self._run.having(weights=weights, ascent=DONE, other_rows=NO_ROWS)

    def training_state(self) -> dict[str, Tensor]:
        """See `Resumable.training_state`; completes the last step."""
        if self._run.parts["ascent"]["is_due"]:
            self._commit(self._begun(*self._train_problem()))
        return super().training_state()

    def _start(self, problem: WeightSpaceProblem, run: Run) -> Run:
        precision, moment = exact_statistics(problem, centred=False)
        weights = WeightDistribution.from_precision(precision, moment)
        inverse = weights.root @ weights.root.mT
        exact_from = precision.norm() * inverse.norm()
        strength = MARGIN * exact_from if self.mu == "auto" else torch.full_like(exact_from, self.mu)
        scale = precision.diagonal().mean()
        dual = _in_ball(-precision.norm() * inverse / strength)
        return run.having(
            weights={"dual": dual, "scale": scale, "strength": strength},
            parameters={"mean": weights.mean, "auxiliary": precision / scale},
            ascent=DONE,
        )

    def _weights(self, run: Run) -> WeightDistribution:
        auxiliary, scale = run.parts["parameters"]["auxiliary"], run.parts["weights"]["scale"]
        factor = positive_factor(auxiliary * scale)
        return WeightDistribution.from_factor(factor, run.parts["parameters"]["mean"])

    def _step(self, problem: WeightSpaceProblem, rows: Tensor, run: Run) -> tuple[Tensor, Run]:
        own, fixed = run.parts["parameters"], run.parts["weights"]
        batch, auxiliary, scale = self._batch(problem, rows), own["auxiliary"], fixed["scale"]
        coupling = fixed["strength"] * fixed["dual"] / auxiliary.norm()
        log_determinant = torch.logdet(auxiliary) + self.num_features * scale.log()
        identity = torch.eye(self.num_features, dtype=coupling.dtype, device=coupling.device)
        data = surrogate(batch, own["mean"], -coupling / scale, identity)
        return data + log_determinant + (coupling * auxiliary).sum(), run.having(ascent=DUE)

    def _settle(self, problem: WeightSpaceProblem, run: Run) -> Run:
        if not run.parts["ascent"]["is_due"]:
            return run
        own, fixed = run.parts["parameters"], run.parts["weights"]
        scale = fixed["scale"]
        values, vectors = torch.linalg.eigh(own["auxiliary"])
        auxiliary = (vectors * values.clamp(min=1 / scale)) @ vectors.mT
        rows, run = next_rows(run, "other_rows", problem.num_data, self._current_batch_size())
        off = auxiliary - self._batch(problem, rows.to(auxiliary.device)).precision() / scale
        dual = _in_ball(fixed["dual"] + DUAL_STEP * off / auxiliary.norm())
        return run.having(
            weights={**fixed, "dual": dual},
            parameters={**own, "auxiliary": auxiliary},
            ascent=DONE,
        )


def _in_ball(matrix: Tensor) -> Tensor:
    return matrix / matrix.norm().clamp(min=1)

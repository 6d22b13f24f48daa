"""The biased baseline: conjugate gradients cut after a fixed number of steps."""

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholesky
from gpy_iterative.randomized.series import SeriesMarginalLogLikelihood
from gpy_iterative.randomized.truncation import FixedTruncation


class TruncatedCGMarginalLogLikelihood(SeriesMarginalLogLikelihood):
    """A marginal log likelihood whose solves always take the same number of steps: what others are compared with.

    The value understates the quadratic form and overstates the log-determinant; the gradient is not that of the value, and
    leads to an optimum of its own. `HutchinsonMarginalLogLikelihood` solves to a tolerance,
    `RussianRouletteMarginalLogLikelihood` removes the bias.

    Args:
        likelihood: a Gaussian likelihood (fixed and heteroskedastic noise included).
        model: a `gpytorch.models.ExactGP`.
        num_steps: of every solve.
        tolerance: relative residual at which a column stops earlier; None is 1e-10 in float64 and 1e-6 in float32.
        num_probes: probe vectors, of the preconditioner's covariance.
        preconditioner: None is the identity.
        resample: False keeps the probes of the first step.
        solver: of predictions; None is Cholesky up to 3,000 data, and beyond conjugate gradients to 1e-4.
        products: how kernel products are computed.
        generator: a generator, or the seed of one. The global generator is never touched.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError: an option outside its range.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        num_steps: int = 100,
        tolerance: float | None = None,
        num_probes: int = 10,
        preconditioner: PivotedCholesky | None = PivotedCholesky(rank=5),  # noqa: B008
        resample: bool = True,
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        super().__init__(
            likelihood,
            model,
            truncation=FixedTruncation(num_steps),
            num_truncations=1,
            num_probes=num_probes,
            shares_truncation=True,
            preconditioner=preconditioner,
            value="truncated",
            tolerance=tolerance,
            resample=resample,
            solver=solver,
            products=products,
            generator=generator,
        )

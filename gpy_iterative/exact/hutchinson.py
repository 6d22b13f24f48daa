"""Hutchinson's estimator, with probes from a preconditioner's covariance.

Gardner et al. 2018, "GPyTorch: Blackbox Matrix-Matrix Gaussian Process Inference", use identity covariance.
"""

from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP

from gpy_iterative.checks import check_choice
from gpy_iterative.exact.base import IterativeMarginalLogLikelihood
from gpy_iterative.exact.probes import Gaussian, Preconditioned, Rademacher
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.training.progress import Progress

_DISTRIBUTIONS = {"preconditioned": Preconditioned, "rademacher": Rademacher, "gaussian": Gaussian}


class HutchinsonMarginalLogLikelihood(IterativeMarginalLogLikelihood):
    """Marginal log likelihood of an exact Gaussian process, for any kernel.

    It replaces `gpytorch.mlls.ExactMarginalLogLikelihood`. Up to 3,000 data it is exact (Cholesky); with more, a step
    costs a few passes over the kernel matrix.

    Args:
        num_probes: the gradient's variance falls as 1 / num_probes.
        probes: "preconditioned" (lowest variance: covariance of a pivoted Cholesky factor plus noise, or of the solver's
            `Vecchia` or `LowRankPlusVecchia` preconditioner, with a control variate for up to three inputs), "rademacher"
            or "gaussian" (identity).
        solver: None chooses by size and structure, see `gpy_iterative.solvers.default_solver`; once a low rank leaves much,
            it is conjugate gradients with `LowRankPlusVecchia`.
        warm_start: start at 2 V_t - V_{t-1} of the last solutions ("extrapolated") or V_t ("previous"), with frozen probes;
            False starts at zero with new probes.
        products: how kernel products are computed.
        generator: a generator or a seed; None takes the seed of `torch.manual_seed`.
        progress: True shows a bar for every solve; a callable gets every `gpy_iterative.progress.ProgressReport`.

    Raises:
        UnsupportedLikelihoodError: a non-Gaussian likelihood.
        ValueError, TypeError: an invalid option, non-finite training inputs.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
        >>> (-mll(model(train_x), train_y)).backward()
        >>> mll.report.status.name
        'CONVERGED'
        >>> likelihood(mll.posterior()(test_x)).mean.shape
        torch.Size([20])
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        num_probes: int = 16,
        probes: Literal["preconditioned", "rademacher", "gaussian"] = "preconditioned",
        solver: Solver | None = None,
        warm_start: Literal["extrapolated", "previous", False] = "extrapolated",
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
        progress: Progress = False,
    ) -> None:
        check_choice("probes", probes, _DISTRIBUTIONS)
        super().__init__(
            likelihood,
            model,
            probes=_DISTRIBUTIONS[probes](num_probes=num_probes),
            solver=solver,
            warm_start=warm_start,
            products=products,
            generator=generator,
            progress=progress,
        )

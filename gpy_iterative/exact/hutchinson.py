"""Hutchinson's estimator, with probes drawn from a preconditioner's covariance.

Gardner et al. 2018, "GPyTorch: Blackbox Matrix-Matrix Gaussian Process Inference", estimate the gradient's
trace from probes with identity covariance. Probes whose covariance S resembles H make the same estimate with
a fraction of the variance: tr(H^-1 dH) = E[(H^-1 xi)^T dH (S^-1 xi)] for any S.
"""

from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP

from gpy_iterative.exact.base import IterativeMarginalLogLikelihood
from gpy_iterative.exact.probes import Gaussian, Preconditioned, Rademacher
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.training.progress import Progress

_DISTRIBUTIONS = {"preconditioned": Preconditioned, "rademacher": Rademacher, "gaussian": Gaussian}


class HutchinsonMarginalLogLikelihood(IterativeMarginalLogLikelihood):
    """The marginal log likelihood of an exact Gaussian process, for any kernel, without its matrix.

    Takes the place of `gpytorch.mlls.ExactMarginalLogLikelihood` in an unchanged training loop. Up to 3,000 data it is
    exact (Cholesky); beyond, a step costs a few passes over the kernel matrix, which is stored as far as `products` allows.

    Args:
        likelihood: a Gaussian likelihood (fixed and heteroskedastic noise included).
        model: a `gpytorch.models.ExactGP`.
        num_probes: probe vectors. The gradient's variance falls as 1 / num_probes.
        probes: "preconditioned" (covariance of a rank-100 pivoted Cholesky factor plus noise, or of the solver's
            preconditioner where that is `Vecchia`; lowest variance), "rademacher" or "gaussian" (identity covariance).
        solver: None chooses by size and structure, see `gpy_iterative.solvers.default_solver`.
        warm_start: "extrapolated" starts each solve at twice the last solution less the one before, "previous"
            at the last; both keep the probes frozen. False draws new probes and starts at zero, every step.
        products: how kernel products are computed.
        generator: a generator, or the seed of one. The global generator is never touched.
        progress: True shows a bar for every solve; a callable gets every `gpy_iterative.progress.ProgressReport`.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError: an option outside its range, training inputs that are not finite.
        TypeError: a model that is no ExactGP; a solver, products or progress of another type.

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
        if probes not in _DISTRIBUTIONS:
            raise ValueError(f"probes must be one of {', '.join(_DISTRIBUTIONS)}, got {probes!r}.")
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

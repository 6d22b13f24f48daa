"""Pathwise probes: samples of the prior.

Lin et al. 2024, "Improving Linear System Solvers for Hyperparameter Optimisation in Iterative Gaussian Processes"
(arXiv 2405.18457), sections 3 and 4.
"""

from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP

from gpy_iterative.checks import check_choice, check_flag
from gpy_iterative.exact.base import IterativeMarginalLogLikelihood
from gpy_iterative.exact.probes import ExactPrior, ProbeDistribution, RandomFeatures
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.training.progress import Progress

#: More frequencies lower the variance; m of them cost n (2m)^2.
DEFAULT_NUM_FREQUENCIES = 200


class PathwiseMarginalLogLikelihood(IterativeMarginalLogLikelihood):
    """Marginal log likelihood of an exact Gaussian process, with samples of its prior as probes.

    Probes xi = Phi(X) w + sqrt(noise) e have the covariance S = Phi Phi^T + D. Other arguments and errors are those of
    `HutchinsonMarginalLogLikelihood`.

    Args:
        model: its kernel has a registered spectral density.
        num_frequencies: per kernel term; None is 200.
        prior: random Fourier "features", or "exact" (Cholesky, for small n).
        corrected: True is unbiased. False takes S = H as published: more probes do not reduce the error of its features.

    Raises:
        SpectralDensityMissingError: at the first step, a kernel without spectral density.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.PathwiseMarginalLogLikelihood(likelihood, model, num_probes=8, generator=0)
        >>> (-mll(model(train_x), train_y)).backward()
        >>> paths = mll.posterior().sample_paths(8)
        >>> paths(test_x).shape
        torch.Size([8, 20])
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        num_probes: int = 16,
        num_frequencies: int | None = None,
        prior: Literal["features", "exact"] = "features",
        corrected: bool = True,
        warm_start: Literal["extrapolated", "previous", False] = "extrapolated",
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
        progress: Progress = False,
    ) -> None:
        check_choice("prior", prior, ("features", "exact"))
        check_flag("corrected", corrected)
        probes: ProbeDistribution
        if prior == "exact":
            if num_frequencies is not None:
                raise ValueError(
                    f"num_frequencies={num_frequencies} is for prior='features' only: leave it out with prior='exact'."
                )
            probes = ExactPrior(num_probes=num_probes)
        else:
            frequencies = DEFAULT_NUM_FREQUENCIES if num_frequencies is None else num_frequencies
            probes = RandomFeatures(num_probes=num_probes, num_frequencies=frequencies, corrected=corrected)
        super().__init__(
            likelihood,
            model,
            probes=probes,
            warm_start=warm_start,
            solver=solver,
            products=products,
            generator=generator,
            progress=progress,
        )

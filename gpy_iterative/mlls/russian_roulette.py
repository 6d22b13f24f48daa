"""Unbiased training with a random number of conjugate gradient steps.

Potapczynski et al. 2021, "Bias-Free Scalable Gaussian Processes via Randomized Truncations", section 4.1, with corrections:
a reweighted sum is kept where a column converges early, the rate follows the decay of the solution (rho^-j, not rho^-2j),
and any number of truncations is taken from one run.
"""

import math
import warnings
from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP

from gpy_iterative.checks import check_count
from gpy_iterative.errors import VarianceWarning
from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.mlls.estimates import Estimate
from gpy_iterative.mlls.report import TruncationReport
from gpy_iterative.mlls.series import SeriesMarginalLogLikelihood, Value
from gpy_iterative.preconditioners import PivotedCholesky
from gpy_iterative.solvers import Solver
from gpy_iterative.truncation import AutomaticTruncation, ExponentialTruncation, Truncation


class RussianRouletteMarginalLogLikelihood(SeriesMarginalLogLikelihood):
    """The marginal log likelihood of an exact Gaussian process: unbiased value and gradient at a bounded expected cost.

    Conjugate gradients cut after a fixed number of steps have an optimum of their own. Cut after a random number J of
    steps, with step j divided by the probability of reaching it, they have the right one: bias becomes variance, which Adam
    averages out. Noisy values and gradients are no food for L-BFGS or a line search, nor are frozen
    ones (`resample=False`), which do not belong together: use Adam.

    Args:
        likelihood: a Gaussian likelihood (fixed and heteroskedastic noise included).
        model: a `gpytorch.models.ExactGP`.
        truncation: the distribution of J. An object with the methods of `gpy_iterative.truncation.Truncation`, or
            `AutomaticTruncation()`, which takes rate and minimum from the decay that the last step showed.
        num_truncations: M independent draws of J for the targets, from one run: vector sums beside its products. More of
            them lower the variance of the quadratic term and lengthen the run, whose expectation is that of the largest.
        num_probes: probe vectors.
        probe_truncation: "independent" draws J for each probe, which averages over the truncations too; "shared" uses the
            first one of the targets' for all of them, which keeps the run as short as that of the targets.
        preconditioner: of the series and of the probes, which have its covariance; None is the identity. A larger rank
            lowers the condition number, and thereby the variance, at little cost.
        value: "unbiased" (quadratic form and log-determinant by the same weights), "truncated" (smoother, biased: the
            data fit comes out too good and the complexity too large), or None: the number is then that of the surrogate
            alone, whose gradient is the same and which costs one more product in place of the logarithms.
        tolerance: relative residual at which a series has converged; None is 1e-10 in float64 and 1e-6 in float32.
        resample: False keeps J and probes of the first step.
        solver: of predictions; None is Cholesky up to 3,000 data, and beyond conjugate gradients to 1e-4.
        products: how kernel products are computed.
        generator: a generator, or the seed of one. The global generator is never touched.

    With `resample=False` the draws are in `training_state()` ("series.target_stops", "series.probe_stops" and the probes'
    randomness), where others can be put in their place.

    A step costs E[largest J] products with H, of which only open columns take part, and one derivative pass with
    M - 1 + num_probes pairs of columns. `report.truncation` has the draws, the variance and the decay.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError: an option outside its range.
        TypeError: a truncation without the two methods.

    Warns:
        VarianceWarning: the truncation's variance exceeds the squared solution, or would without bound.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> truncation = gpi.truncation.ExponentialTruncation(min_steps=10, rate=0.2)
        >>> mll = gpi.mlls.RussianRouletteMarginalLogLikelihood(likelihood, model, truncation=truncation, generator=0)
        >>> (-mll(model(train_x), train_y)).backward()
        >>> bool((mll.report.truncation.target_steps >= 10).all())
        True
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        truncation: Truncation | AutomaticTruncation = ExponentialTruncation(min_steps=80, rate=0.05),  # noqa: B008
        num_truncations: int = 2,
        num_probes: int = 10,
        probe_truncation: Literal["independent", "shared"] = "independent",
        preconditioner: PivotedCholesky | None = PivotedCholesky(rank=5),  # noqa: B008
        value: Value = "unbiased",
        tolerance: float | None = None,
        resample: bool = True,
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        check_count("num_truncations", num_truncations)
        if num_truncations < 2:
            raise ValueError(
                f"num_truncations must be at least 2, got {num_truncations}: the gradient's quadratic term needs two "
                "independent ones. TruncatedCGMarginalLogLikelihood takes one."
            )
        if probe_truncation not in ("independent", "shared"):
            raise ValueError(f"probe_truncation must be 'independent' or 'shared', got {probe_truncation!r}.")
        super().__init__(
            likelihood,
            model,
            truncation=truncation,
            num_truncations=num_truncations,
            num_probes=num_probes,
            shares_truncation=probe_truncation == "shared",
            preconditioner=preconditioner,
            value=value,
            tolerance=tolerance,
            resample=resample,
            solver=solver,
            products=products,
            generator=generator,
        )

    def _warn_once(self, estimate: Estimate) -> None:
        report = estimate.truncation
        if not isinstance(report, TruncationReport) or self._has_warned:
            return
        variance = float(report.relative_variance.max())
        is_infinite = _grows_without_bound(report, estimate.stats.residual_norms["targets"])
        if variance > 1 or is_infinite:
            decay = float(report.decay_rate.min())
            what = (
                "grows without bound with the length of the series"
                if is_infinite
                else f"is {variance:.2g} times the squared solution"
            )
            warnings.warn(
                f"The variance of the truncated solve {what}: its terms fall as exp(-{decay:.3g} j) in norm, which asks "
                f"for a rate of at most {max(decay, 0):.3g}. Lower it, raise min_steps, or take a larger preconditioner; "
                "AutomaticTruncation() chooses rate and min_steps by itself.",
                VarianceWarning,
                stacklevel=3,
            )
            self._has_warned = True


def _grows_without_bound(report: TruncationReport, residual: float) -> bool:
    """Whether weighted terms 1 / S_j |term_j|^2 grow where the series was cut, far from its end."""
    last = int(report.steps[..., 0].max())
    if bool(report.converged[..., 0].all()) or last < 4 or residual < 1e-2:
        return False
    ahead = report.truncation.log_survival(torch.arange(last, last + 2))
    if not torch.isfinite(ahead).all():
        return False  # the last step of all
    rate = float(ahead[0] - ahead[1])
    return rate > 2 * float(report.decay_rate.min()) and math.isfinite(rate)

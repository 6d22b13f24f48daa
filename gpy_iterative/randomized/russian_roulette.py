"""Russian-roulette conjugate gradients, and their biased baseline."""

import math
from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP

from gpy_iterative.checks import check_count
from gpy_iterative.errors import BiasWarning, VarianceWarning, warn
from gpy_iterative.exact.estimates import Estimate
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholesky
from gpy_iterative.randomized.series import SeriesMarginalLogLikelihood, TruncationReport
from gpy_iterative.randomized.truncation import AutomaticTruncation, ExponentialTruncation, FixedTruncation, Truncation
from gpy_iterative.worker_threads import CPU

#: Relative residual of an ordinary converged solve.
SOLVED = 0.01


class RussianRouletteMarginalLogLikelihood(SeriesMarginalLogLikelihood):
    """Marginal log likelihood of an exact Gaussian process: unbiased value and gradient at bounded expected cost.

    Conjugate gradients stop after a random number J of steps; step j is divided by P(J >= j). Train with Adam: line
    searches fail.

    Args:
        likelihood, model, products, generator: as in `HutchinsonMarginalLogLikelihood`.
        truncation: distribution of J: a `gpy_iterative.truncation.Truncation` or `AutomaticTruncation()`.
        num_truncations: M draws of J for the targets. More lower the variance and lengthen the run.
        num_probes: probe vectors.
        probe_truncation: "independent" draws J per probe (less variance); "shared" uses the targets' first J (shorter run).
        preconditioner: of the series, and covariance of the probes; None: the identity. A larger rank lowers the
            variance.
        tolerance: as in `conjugate_gradient_series`.
        resample: False keeps J and probes of the first step.
        solver: of predictions; None is `gpy_iterative.solvers.default_solver`.

    Cost: E[largest J] products of H with the open columns, one derivative pass with M - 1 + num_probes pairs of columns.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError, TypeError: an invalid option; (from the call) a rate too high for the dtype.

    Warns:
        VarianceWarning: the variance exceeds the squared solution.
        BiasWarning: the truncation ended before the series converged.

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
            tolerance=tolerance,
            resample=resample,
            solver=solver,
            products=products,
            generator=generator,
        )
        self._has_warned = False

    def _warn_once(self, estimate: Estimate) -> None:
        super()._warn_once(estimate)
        report = estimate.truncation
        if not isinstance(report, TruncationReport) or self._has_warned:
            return
        residual, last = estimate.stats.residual_norms["targets"], int(report.steps[..., 0].max())
        decay = float(report.decay_rate.min())
        if not math.isfinite(decay):  # too few terms: use the residual
            decay = -math.log(max(residual, 1e-300)) / max(last, 1)
        is_open = residual >= SOLVED and not report.converged[..., 0].all()
        here, beyond = report.truncation.log_survival(torch.arange(last, last + 2, device=CPU)).tolist()
        if is_open and beyond == -math.inf:
            warn(
                f"The series reached the end of its truncation, {last} steps, with a relative residual of {residual:.2g}: "
                "no draw has the terms beyond, so that value and gradient are biased, however many are averaged. Raise "
                "max_steps (None is the longest that the arithmetic allows), or take a larger preconditioner.",
                BiasWarning,
            )
            self._has_warned = True
        variance = float(report.relative_variance.max())
        is_infinite = is_open and 2 * decay < here - beyond < math.inf  # |term_j|^2 / S_j grows where it was cut
        if variance > 1 or is_infinite:
            what = f"is {variance:.2g} times the squared solution"
            if is_infinite:
                what = "grows without bound with the length of the series, and terms beyond the truncation's end are a bias"
            advice = f"in {last} steps its terms do not fall. Raise"
            if decay > 0:
                advice = f"its terms fall as exp(-{decay:.3g} j) in norm: lower the rate to {decay:.3g} or less, raise"
            warn(
                f"The variance of the truncated solve {what}: {advice} min_steps, or take a larger preconditioner; "
                "AutomaticTruncation() chooses rate and min_steps by itself.",
                VarianceWarning,
            )
            self._has_warned = True


class TruncatedCGMarginalLogLikelihood(SeriesMarginalLogLikelihood):
    """Biased baseline: solves with a fixed number of steps.

    The value's quadratic form is too small, its log-determinant too large; the gradient is not that of the value.

    Args:
        num_steps: of every solve.

    Other options and errors: see `RussianRouletteMarginalLogLikelihood`.
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
            tolerance=tolerance,
            resample=resample,
            solver=solver,
            products=products,
            generator=generator,
        )

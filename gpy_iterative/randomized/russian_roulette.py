"""Russian-roulette conjugate gradients, and their biased baseline."""

import dataclasses
import itertools
import math
import time
from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from linear_operator import LinearOperator

from gpy_iterative.checks import check_choice, check_count, check_flag, check_instance
from gpy_iterative.errors import BiasWarning, VarianceWarning, warn
from gpy_iterative.exact.base import GaussianMarginalLogLikelihood
from gpy_iterative.exact.estimates import DensityEstimate, Estimate
from gpy_iterative.exact.probes import Preconditioned, ProbeDistribution, Rademacher
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.preconditioners.pivoted_cholesky import PivotedCholesky
from gpy_iterative.randomized.series import Member, TruncationReport, pooled_energies, stacked_members
from gpy_iterative.randomized.truncation import (
    AutomaticTruncation,
    ExponentialTruncation,
    FixedTruncation,
    Truncation,
    check_truncation,
    draw_stops,
    survival_table,
    within,
)
from gpy_iterative.spectral.densities import Draws, draws_under
from gpy_iterative.training.run import Run
from gpy_iterative.training.training_system import TrainingSystem
from gpy_iterative.worker_threads import CPU

#: Relative residual of an ordinary converged solve.
SOLVED = 0.01


class RussianRouletteMarginalLogLikelihood(GaussianMarginalLogLikelihood):
    """Marginal log likelihood of an exact Gaussian process: unbiased value and gradient at bounded expected cost.

    Conjugate gradients stop after a random number J of steps; step j is divided by P(J >= j). Train with Adam: line
    searches fail.

    Args:
        likelihood, model, products, generator: as in `HutchinsonMarginalLogLikelihood`.
        truncation: distribution of J: a `gpy_iterative.truncation.Truncation` or `AutomaticTruncation()`.
        num_truncations: M draws of J for the targets, at least 2 if J is random. More lower the variance and lengthen the
            run.
        num_probes: probe vectors.
        probe_truncation: "independent" draws J per probe (less variance); "shared" uses the targets' first J (shorter run).
        preconditioner: of the series, and covariance of the probes; None: the identity. A larger rank lowers the
            variance.
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

    _described = ("probes", "truncation", "num_truncations", "shares_truncation", "resample")

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
        resample: bool = True,
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        check_count("num_truncations", num_truncations)
        if num_truncations < 2 and not isinstance(truncation, FixedTruncation):
            raise ValueError(
                f"num_truncations must be at least 2, got {num_truncations}: the gradient's quadratic term needs two "
                "independent ones. TruncatedCGMarginalLogLikelihood takes one."
            )
        check_choice("probe_truncation", probe_truncation, ("independent", "shared"))
        if not isinstance(truncation, AutomaticTruncation):
            check_truncation(truncation)
        elif not resample:
            raise ValueError(
                "resample=False freezes the draws, which AutomaticTruncation redistributes every step: give an "
                "ExponentialTruncation instead."
            )
        check_instance("preconditioner", preconditioner, PivotedCholesky, "PivotedCholesky(rank=5)")
        check_flag("resample", resample)
        super().__init__(likelihood, model, solver=solver, products=products, generator=generator)
        self.truncation, self.num_truncations = truncation, num_truncations
        self.shares_truncation = probe_truncation == "shared"
        self.resample = resample
        self.probes: ProbeDistribution = Rademacher(num_probes=num_probes)
        if preconditioner is not None:
            self.probes = Preconditioned(num_probes=num_probes, recipe=preconditioner, correct_diagonal=False)
        self._has_warned = False

    def _estimate(self, system: TrainingSystem, run: Run) -> tuple[DensityEstimate, Run]:
        start, operator, residual = time.perf_counter(), system.operator, system.residual
        run = run.for_system(operator)
        truncation = within(self._current_truncation(run), operator.shape[-1], operator.dtype)
        kept = None if self.resample else run.parts.get("series")
        if kept is None:
            generator = run.generator()
            kept = self._draw(operator, truncation, generator)
            run = run.having(generator, series=kept)
        batch = operator.batch_shape
        probes = self.probes.probes(operator, None, draws_under("probes", dict(kept)))
        table = survival_table(
            truncation, torch.cat([kept["target_stops"].reshape(-1), kept["probe_stops"].reshape(-1)])
        )
        members, runs = [], []
        for index in itertools.product(*map(range, batch)):
            member = Member(index, operator, residual, probes, kept)
            series = member.run(table)
            members.append(member.estimate(series, truncation, table[: series.iterations]))
            runs.append(series)
        if isinstance(self.truncation, AutomaticTruncation):
            run = run.having(decay={"energies": pooled_energies(runs)})
        estimate = stacked_members(members, batch)
        stats = dataclasses.replace(estimate.stats, seconds=time.perf_counter() - start)
        return dataclasses.replace(estimate, stats=stats, far_field_error=far_field_error(operator)), run

    def _current_truncation(self, run: Run) -> Truncation:
        if not isinstance(self.truncation, AutomaticTruncation):
            return self.truncation
        seen = run.parts.get("decay")
        if seen is None or not seen["energies"].any():  # a residual of zero shows no decay
            return ExponentialTruncation()
        return self.truncation.choose(seen["energies"].cpu())

    def _draw(self, operator: LinearOperator, truncation: Truncation, generator: torch.Generator) -> Draws:
        batch = operator.batch_shape
        target_stops = draw_stops(truncation, (*batch, self.num_truncations), generator)
        if self.shares_truncation:
            probe_stops = target_stops[..., :1].expand(*batch, self.probes.num_probes).clone()
        else:
            probe_stops = draw_stops(truncation, (*batch, self.probes.num_probes), generator)
        probes = self.probes.draw(operator, None, generator)
        drawn = {f"probes.{name}": tensor for name, tensor in probes.items()}
        return {"target_stops": target_stops, "probe_stops": probe_stops} | drawn

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


class TruncatedCGMarginalLogLikelihood(RussianRouletteMarginalLogLikelihood):
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
            probe_truncation="shared",
            preconditioner=preconditioner,
            resample=resample,
            solver=solver,
            products=products,
            generator=generator,
        )
        self._has_warned = True  # the bias is meant

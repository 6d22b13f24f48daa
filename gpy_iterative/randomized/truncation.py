"""Distributions of the number J of terms of a series.

A sum cut after J terms is unbiased if term j is divided by S_j = P(J >= j): Potapczynski et al. 2021, "Bias-Free
Scalable Gaussian Processes via Randomized Truncations", section 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from gpy_iterative import random_numbers
from gpy_iterative.checks import check_count, check_number
from gpy_iterative.worker_threads import CPU

#: Survival probability that ends an infinite sum.
NEGLIGIBLE = 1e-18
#: Largest weight 1 / S_j, times eps; rounding errors grow with it.
LARGEST_WEIGHT = 0.1
#: Largest chosen rate, and rest of the sum of squared norms beyond a chosen minimum.
MAX_RATE = 0.1
TAIL = 0.1


@runtime_checkable
class Truncation(Protocol):
    """A distribution of J in {1, 2, ...}."""

    def log_survival(self, steps: Tensor) -> Tensor:
        """Log P(J >= j) for integers [*], float64: 0 for j = 1, -inf past the end."""
        ...

    def sample(self, size: Sequence[int], generator: torch.Generator) -> Tensor:
        """Independent J: int64 [*size], on the CPU."""
        ...


@dataclass(frozen=True)
class ExponentialTruncation:
    """P(J) proportional to exp(-rate J) on {min_steps, ..., max_steps} (equation 17).

    Args:
        min_steps: terms always taken, with weight 1.
        rate: 0 is uniform. Best is log(rho) for terms that fall as rho^-j in norm; the variance is finite below twice that.
        max_steps: None is unlimited; `within` sets it for a system.
    """

    min_steps: int = 80
    rate: float = 0.05
    max_steps: int | None = None

    def __post_init__(self) -> None:
        check_count("min_steps", self.min_steps)
        check_count("max_steps", self.max_steps, optional=True)
        if self.max_steps is not None and self.max_steps < self.min_steps:
            raise ValueError(
                f"max_steps must be at least min_steps = {self.min_steps}, got {self.max_steps}. None sets no limit."
            )
        check_number("rate", self.rate, "be finite and not negative", lambda number: 0 <= number < math.inf)
        if self.rate == 0 and self.max_steps is None:
            raise ValueError("rate=0, the uniform distribution, needs an end: pass max_steps, or a positive rate.")

    @classmethod
    def for_condition_number(cls, condition_number: float, budget: float) -> Self:
        """The least variance for a preconditioned condition number and an expected number of steps.

        The rate is log((sqrt(c) + 1) / (sqrt(c) - 1)) for condition number c, at most 0.1. Raises ValueError for a budget
        too small for it.
        """
        for name, value in (("condition_number", condition_number), ("budget", budget)):
            check_number(name, value, "be finite and at least 1", lambda number: 1 <= number < math.inf)
        root = math.sqrt(condition_number)
        rate = MAX_RATE if root == 1 else min(MAX_RATE, math.log1p(2 / (root - 1)))
        min_steps = round(budget - _geometric_mean(rate))
        if min_steps < 1:
            raise ValueError(
                f"A budget of {budget} steps is too small for a condition number of {condition_number:g}, which "
                f"needs {1 + _geometric_mean(rate):.0f} steps: raise the budget, or use a better preconditioner."
            )
        return cls(min_steps, rate)

    def within(self, num_rows: int, dtype: torch.dtype) -> Self:
        """Unless `max_steps` is given, limits steps to 2 n and 1 / S_j to a tenth of 1 / eps.

        Raises ValueError if the rate allows no step beyond `min_steps`.
        """
        if self.max_steps is not None:
            return self
        extra = math.floor(_largest_rate(dtype) / self.rate)
        if extra == 0 and self.min_steps < 2 * num_rows:
            raise ValueError(
                f"rate must be at most {_largest_rate(dtype):.3g} in {dtype}, got {self.rate:g}: at a higher rate every "
                f"series ends at min_steps = {self.min_steps}, which is biased. Lower it, or set max_steps to accept this."
            )
        max_steps = min(2 * num_rows, self.min_steps + extra)
        return replace(self, min_steps=min(self.min_steps, max_steps), max_steps=max_steps)

    def log_survival(self, steps: Tensor) -> Tensor:
        """See `Truncation.log_survival`."""
        beyond = steps.double() - self.min_steps
        # S_j = (e^-ak - e^-aL) / (1 - e^-aL) with k = j - min_steps; 1 - cdf would cancel.
        ahead = (self._support - beyond).clamp_min(0)
        survival = -self.rate * beyond + self._log_mass(ahead) - self._log_mass(ahead.new_tensor(self._support))
        return torch.where(beyond <= 0, torch.zeros_like(beyond), survival)

    def sample(self, size: Sequence[int], generator: torch.Generator) -> Tensor:
        """See `Truncation.sample`."""
        uniform = random_numbers.uniform(size, generator, CPU)
        if self.rate == 0:
            beyond = uniform * self._support
        else:
            # log and exp would lose all digits at a tiny rate.
            beyond = -torch.log1p(uniform * math.expm1(-self.rate * self._support)) / self.rate
        return self.min_steps + beyond.floor().clamp_max(self._support - 1).long()

    def mean(self) -> float:
        """E[J]."""
        return self.min_steps + _geometric_mean(self.rate) if self.max_steps is None else self.expected_max(1)

    def expected_max(self, count: int) -> float:
        """Expected largest of `count` draws."""
        check_count("count", count)
        last = self.max_steps
        if last is None:
            last = self.min_steps + math.ceil(math.log(count / NEGLIGIBLE) / self.rate)
        steps = torch.arange(self.min_steps + 1, last + 1, device=CPU)
        return self.min_steps + float((1 - (1 - self.log_survival(steps).exp()) ** count).sum())

    @property
    def _support(self) -> float:
        """L, the number of values of J."""
        return math.inf if self.max_steps is None else float(self.max_steps - self.min_steps + 1)

    def _log_mass(self, steps: Tensor) -> Tensor:
        return steps.log() if self.rate == 0 else torch.log(-torch.expm1(-self.rate * steps))


def within(truncation: Truncation, num_rows: int, dtype: torch.dtype) -> Truncation:
    return truncation.within(num_rows, dtype) if isinstance(truncation, ExponentialTruncation) else truncation


def check_truncation(truncation: object) -> None:
    if isinstance(truncation, type) or not isinstance(truncation, Truncation):
        raise TypeError(
            "truncation must be an object with the methods log_survival and sample, got "
            f"{truncation!r} of type {type(truncation).__name__}. gpy_iterative.truncation.ExponentialTruncation() is one."
        )


def draw_stops(truncation: Truncation, size: Sequence[int], generator: torch.Generator) -> Tensor:
    """Checked draws, [*size] on the CPU."""
    stops = truncation.sample(size, generator)
    if tuple(stops.shape) != tuple(size):
        raise ValueError(
            f"{type(truncation).__name__}.sample must return draws of the size that it is asked for, {tuple(size)}, got "
            f"{tuple(stops.shape)}: two sums must not share a draw."
        )
    return stops.cpu()


def survival_table(truncation: Truncation, stops: Tensor) -> Tensor:
    """Checked log S_j for j = 1, ..., max(stops)."""
    name = type(truncation).__name__
    if not stops.numel():
        return torch.zeros(0, dtype=torch.float64, device=CPU)
    if stops.dtype != torch.int64 or int(stops.min()) < 1:
        raise ValueError(f"{name}.sample must return int64 draws of at least 1, got {stops.dtype}: {stops.tolist()}.")
    table = truncation.log_survival(torch.arange(1, int(stops.max()) + 1, device=CPU)).double().cpu()
    wrong = ~torch.isfinite(table) | (table > torch.cat([table.new_zeros(1), table[:-1]]) + 1e-12)
    wrong[0] |= bool(table[0] != 0)
    if wrong.any():
        step = int(wrong.nonzero()[0]) + 1
        raise ValueError(
            f"{name}.log_survival must be 0 for j = 1, never increase, and be finite up to the largest draw "
            f"{int(stops.max())}; for j = {step} it is {float(table[step - 1])}."
        )
    return table


@dataclass(frozen=True)
class FixedTruncation:
    """A fixed number of steps: biased, all weights are 1."""

    num_steps: int

    def __post_init__(self) -> None:
        check_count("num_steps", self.num_steps)

    def log_survival(self, steps: Tensor) -> Tensor:
        """See `Truncation.log_survival`."""
        return torch.zeros_like(steps, dtype=torch.float64).masked_fill(steps > self.num_steps, -math.inf)

    def sample(self, size: Sequence[int], generator: torch.Generator) -> Tensor:
        """See `Truncation.sample`."""
        return torch.full(tuple(size), self.num_steps, device=CPU)


@dataclass(frozen=True)
class AutomaticTruncation:
    """Rate and minimum from the last step's decay (this step's would cause bias); the first has `ExponentialTruncation()`.

    The rate is log(rho) of terms that fall as rho^-j, at most 0.1. The minimum leaves a tenth of the sum of squared norms.
    """

    def choose(self, energies: Tensor) -> ExponentialTruncation:
        """The next truncation, from a step's squared norms of terms, [J]."""
        energies = energies.double()
        decay = decay_rate(energies)
        # A short run barely shows a decay: at most threefold growth per step.
        rate = min(MAX_RATE, max(decay, 1 / len(energies)))
        min_steps = min(_steps_to_tail(energies, decay), 2 * len(energies))
        return ExponentialTruncation(min_steps, rate)


def _steps_to_tail(energies: Tensor, decay: float) -> int:
    """First j that leaves at most TAIL of the sum, extrapolated geometrically."""
    if decay <= 0:
        return 2 * len(energies)
    rest = float(energies[-1]) * _geometric_mean(2 * decay)
    after = energies.flip(0).cumsum(0).flip(0) - energies + rest
    allowed = TAIL * (float(energies.sum()) + rest)
    enough = (after <= allowed).nonzero()
    if len(enough):
        return int(enough[0]) + 1
    return len(energies) + math.ceil(math.log(rest / allowed) / (2 * decay))


def decay_rate(energies: Tensor) -> float:
    """log(rho) of norms that fall as rho^-j, from the second half of their squares [J]; inf for fewer than four."""
    logarithms = energies[energies > 0].double().log() / 2
    if len(logarithms) < 4:
        return math.inf
    half = logarithms[len(logarithms) // 2 :]
    steps = torch.arange(len(half), dtype=torch.float64, device=CPU)
    steps -= steps.mean()
    return -float((steps * half).sum() / steps.square().sum())


def _largest_rate(dtype: torch.dtype) -> float:
    return math.log(LARGEST_WEIGHT / torch.finfo(dtype).eps)


def _geometric_mean(x: float) -> float:
    """1 / (e^x - 1); e^x may be infinite."""
    return math.exp(-x) / -math.expm1(-x)

"""Unbiased training with random features: one random increment of a grid, divided by its probability.

Potapczynski et al. 2021 (see `truncation.py`), section 4.2, with differences of grid neighbours.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative import random_numbers
from gpy_iterative.checks import check_choice, check_count, check_flag
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.randomized.random_features import FrequencyReport, RandomFeatureMarginalLogLikelihood
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.training.run import Run
from gpy_iterative.worker_threads import CPU

#: Initial adaptive probability of the exact term.
EXACT_SHARE = 0.4
#: Weight of a prior guess, in observations.
PRIOR_COUNT = 4.0
#: Uniform share of draws.
UNIFORM_SHARE = 0.05


class SingleSampleRFFMarginalLogLikelihood(RandomFeatureMarginalLogLikelihood):
    """The marginal log likelihood from random features, with unbiased value and gradient.

    A step evaluates the log likelihoods of m_0, m_{k-1} and m_k nested frequencies for one random k. Its value is one draw
    without a standard error, and may be a nat per datum off for tens of frequencies, .1 for 500: average many.

    Args:
        likelihood: Gaussian with diagonal noise.
        model: an ExactGP whose kernel has a registered spectral density.
        min_frequencies: m_0.
        frequency_step: m_k - m_{k-1}; the grid ends with the exact log likelihood.
        max_frequencies: limit of m_k; None is half the number of data.
        probabilities: "inverse", proportional to 1 / m_k; "adaptive", to the root mean square of earlier increments.
        resample: False keeps frequencies and increment of the first step.
        solver, products, generator: as in `RussianRouletteMarginalLogLikelihood`.

    Cost: as `RFFMarginalLogLikelihood` with m_k frequencies, and n^3 for the exact term.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError: an invalid option, a grid without increments.
        SpectralDensityMissingError: (from the call) no differentiable random features.
    """

    _described = ("min_frequencies", "frequency_step", "max_frequencies", "probabilities", "resample")

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        min_frequencies: int = 500,
        frequency_step: int = 100,
        max_frequencies: int | None = None,
        probabilities: Literal["inverse", "adaptive"] = "inverse",
        resample: bool = True,
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        check_count("min_frequencies", min_frequencies)
        check_count("frequency_step", frequency_step)
        check_count("max_frequencies", max_frequencies, optional=True)
        check_choice("probabilities", probabilities, ("inverse", "adaptive"))
        if not resample and probabilities == "adaptive":
            raise ValueError("resample=False freezes the draw, whose probabilities cannot adapt: take 'inverse'.")
        check_flag("resample", resample)
        super().__init__(likelihood, model, solver=solver, products=products, generator=generator)
        self.min_frequencies, self.frequency_step = min_frequencies, frequency_step
        self.max_frequencies, self.resample = max_frequencies, resample
        self.probabilities = probabilities
        if max_frequencies is not None:
            self._grid(0)  # checks it
        if not resample:
            self._line_search = None

    def _grid(self, num_data: int) -> Tensor:
        """m_0, m_1, ..., at least two."""
        largest = num_data // 2 if self.max_frequencies is None else self.max_frequencies
        if largest < self.min_frequencies + self.frequency_step:
            limit, advice = f"half of {num_data} data", "take an exact likelihood for so few data"
            if self.max_frequencies is not None:
                limit, advice = "max_frequencies", "raise max_frequencies"
            raise ValueError(
                f"The grid of frequencies is empty: min_frequencies = {self.min_frequencies} and frequency_step = "
                f"{self.frequency_step} leave no increment up to {largest} ({limit}). Lower them, or {advice}."
            )
        return torch.arange(self.min_frequencies, largest + 1, self.frequency_step, device=CPU)

    def _probabilities(self, grid: Tensor, run: Run) -> Tensor:
        """p_k for k = 1, 2, ..., float64."""
        guess = 1 / grid[1:].double()
        if self.probabilities == "inverse":
            return guess / guess.sum()
        if len(guess) > 1:
            guess[-1] = EXACT_SHARE / (1 - EXACT_SHARE) * guess[:-1].sum()
        seen = _seen(run, len(guess))
        if int((seen["count"] > 0).sum()):
            # The guess is known up to a factor.
            scale = (seen["squares"] / guess.square()).sum() / seen["count"].sum()
            guess = (
                (PRIOR_COUNT * scale * guess.square() + seen["squares"]) / (PRIOR_COUNT + seen["count"])
            ).sqrt() + torch.finfo(torch.float64).tiny
        return (1 - UNIFORM_SHARE) * guess / guess.sum() + UNIFORM_SHARE / len(guess)

    def _draw(self, num_data: int, run: Run, generator: torch.Generator) -> tuple[int, Draws]:
        grid = self._grid(num_data)
        probabilities = self._probabilities(grid, run)
        drawn = random_numbers.uniform((), generator, CPU)
        index = int(torch.searchsorted(probabilities.cumsum(0), drawn).clamp_max(len(grid) - 2)) + 1
        # The exact term needs no features of its own.
        count = int(grid[index - 1] if index == len(grid) - 1 else grid[index])
        return count, {"index": torch.tensor(index, device=CPU), "probability": probabilities[index - 1]}

    def _sum(self, num_data: int, draws: Draws) -> tuple[Mapping[int, float], float, FrequencyReport]:
        grid, index, probability = self._grid(num_data), int(draws["index"]), float(draws["probability"])
        lower, upper = grid[index - 1 : index + 1].tolist()
        is_exact = index == len(grid) - 1
        weights = {self.min_frequencies: 1.0}
        weights[lower] = weights.get(lower, 0.0) - 1 / probability
        if not is_exact:
            weights[upper] = 1 / probability
        report = FrequencyReport(lower if is_exact else upper, index, probability, is_exact)
        return weights, 1 / probability if is_exact else 0.0, report

    def _after(self, num_data: int, run: Run, draws: Draws, densities: Sequence[Tensor]) -> Run:
        if self.probabilities == "inverse":
            return run
        lower, upper = densities[-2:]
        seen = {name: tensor.clone() for name, tensor in _seen(run, len(self._grid(num_data)) - 1).items()}
        seen["count"][int(draws["index"]) - 1] += 1
        seen["squares"][int(draws["index"]) - 1] += float((upper - lower).square().mean())
        return run.having(increments=seen)


def _seen(run: Run, increments: int) -> Draws:
    """Number of each increment's draws, and their sum of squares."""
    seen = run.parts.get("increments")
    if seen is None or len(seen["count"]) != increments:
        zeros = torch.zeros(increments, dtype=torch.float64, device=CPU)
        return {"count": zeros, "squares": zeros}
    return {name: tensor.double().cpu() for name, tensor in seen.items()}

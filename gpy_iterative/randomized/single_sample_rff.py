"""Unbiased training with random features: one random increment of a grid, divided by its probability.

Potapczynski et al. 2021, section 4.2 and appendix B, with corrections: differences of neighbours on the grid (which
telescope), probabilities by the number of frequencies and not by the index, and room for the exact term's own jump.
"""

from typing import Literal

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.checks import check_count, check_flag
from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.linear_solvers.base import Solver
from gpy_iterative.randomized.feature_estimate import FeatureEstimate, FeatureStep
from gpy_iterative.randomized.random_features import RandomFeatureMarginalLogLikelihood
from gpy_iterative.randomized.report import FrequencyReport
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.training.run import Run

#: Probability of the exact term before its jump has been seen, where probabilities adapt.
EXACT_SHARE = 0.4
#: How many observations the prior guess of an increment's size counts for.
PRIOR_COUNT = 4.0
#: The share of every step's draws that stays uniform on the grid, so that no probability vanishes.
UNIFORM_SHARE = 0.05


class SingleSampleRFFMarginalLogLikelihood(RandomFeatureMarginalLogLikelihood):
    """The marginal log likelihood from random features, without their bias in value and gradient.

    On the grid m_k = min_frequencies + k frequency_step, a step evaluates the log likelihoods of m_0, m_{k-1} and m_k
    nested random frequencies, for one random k. Its variance is large: the paper counts hundreds of times as many Adam
    steps as for a biased estimate, at small learning rates. For daily use there is
    `RussianRouletteMarginalLogLikelihood`.

    Args:
        likelihood: a Gaussian likelihood with diagonal noise (fixed and heteroskedastic included).
        model: a `gpytorch.models.ExactGP` whose kernel has a registered spectral density.
        min_frequencies: m_0.
        frequency_step: between neighbours on the grid.
        max_frequencies: the largest m_k is not above it; None is half the number of data.
        probabilities: "inverse" is the paper's, proportional to 1 / m_k; "adaptive" is proportional to the root mean square
            increments that earlier steps saw, begins with a share of 0.4 for the exact term, and never looks at the current
            step; or a tensor with one for every k >= 1.
        exact_last: the last log likelihood of the grid is replaced by the exact one, a dense Cholesky factor of O(n^3).
            False is unbiased for the likelihood of the last number of frequencies on the grid.
        resample: False keeps frequencies and increment of the first step.
        solver: of predictions, which are of the kernel itself; None is Cholesky up to 3,000 data, and beyond conjugate
            gradients to 1e-4.
        products: how kernel products are computed.
        generator: a generator, or the seed of one. The global generator is never touched.

    A step costs n (2 m_k)^2 + (2 m_k)^3, and n^3 when the exact term is drawn; memory some six times n 2 m_k.

    Raises:
        UnsupportedLikelihoodError: the likelihood is not Gaussian.
        ValueError: an option outside its range; (from the call) a grid without increments, or probabilities that do not
            fit it.
        SpectralDensityMissingError: (from the call) the kernel has no random features, or no gradient through them.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        model: ExactGP,
        *,
        min_frequencies: int = 500,
        frequency_step: int = 100,
        max_frequencies: int | None = None,
        probabilities: Literal["inverse", "adaptive"] | Tensor = "inverse",
        exact_last: bool = True,
        resample: bool = True,
        solver: Solver | None = None,
        products: KernelProducts | None = None,
        generator: torch.Generator | int | None = None,
    ) -> None:
        check_count("min_frequencies", min_frequencies)
        check_count("frequency_step", frequency_step)
        if max_frequencies is not None:
            check_count("max_frequencies", max_frequencies)
        second = min_frequencies + frequency_step
        if max_frequencies is not None and max_frequencies < second:
            raise ValueError(
                f"max_frequencies must be at least min_frequencies + frequency_step = {second}, got {max_frequencies}: the "
                "grid needs an increment."
            )
        if isinstance(probabilities, Tensor):
            _check_probabilities(probabilities)
        elif not isinstance(probabilities, str) or probabilities not in ("inverse", "adaptive"):
            raise ValueError(f"probabilities must be 'inverse', 'adaptive' or a tensor, got {probabilities!r}.")
        adapts = isinstance(probabilities, str) and probabilities == "adaptive"
        if not resample and adapts:
            raise ValueError("resample=False freezes the draw, whose probabilities cannot adapt: take 'inverse'.")
        super().__init__(
            likelihood,
            model,
            resample=resample,
            solver=solver,
            products=products,
            generator=generator,
            options={
                "min_frequencies": min_frequencies,
                "frequency_step": frequency_step,
                "max_frequencies": max_frequencies,
                "probabilities": probabilities,
                "exact_last": exact_last,
            },
        )
        self.min_frequencies, self.frequency_step = min_frequencies, frequency_step
        self.max_frequencies = max_frequencies
        check_flag("exact_last", exact_last)
        self.probabilities, self.exact_last, self._adapts = probabilities, exact_last, adapts

    def _grid(self, num_data: int) -> Tensor:
        """m_0, m_1, ..., at least two of them."""
        largest = num_data // 2 if self.max_frequencies is None else self.max_frequencies
        if largest < self.min_frequencies + self.frequency_step:
            raise ValueError(
                f"The grid of frequencies is empty: min_frequencies = {self.min_frequencies} and frequency_step = "
                f"{self.frequency_step} leave no increment up to {largest} (max_frequencies, or half of {num_data} data). "
                "Lower them, or take an exact likelihood for so few data."
            )
        return torch.arange(self.min_frequencies, largest + 1, self.frequency_step)

    def _probabilities(self, grid: Tensor, run: Run) -> Tensor:
        """p_k for k = 1, 2, ..., float64."""
        if isinstance(self.probabilities, Tensor):
            if len(self.probabilities) != len(grid) - 1:
                raise ValueError(
                    f"probabilities must have one entry for each of the {len(grid) - 1} increments of the grid, got "
                    f"{len(self.probabilities)}."
                )
            return self.probabilities.double().cpu()
        guess = 1 / grid[1:].double()
        if not self._adapts:
            return guess / guess.sum()
        if self.exact_last and len(guess) > 1:
            guess[-1] = EXACT_SHARE / (1 - EXACT_SHARE) * guess[:-1].sum()
        seen = _seen(run, len(guess))
        if int((seen["count"] > 0).sum()):
            # The guess is one of proportions: it takes its scale from what was seen.
            scale = (seen["squares"] / guess.square()).sum() / seen["count"].sum()
            guess = (
                (PRIOR_COUNT * scale * guess.square() + seen["squares"]) / (PRIOR_COUNT + seen["count"])
            ).sqrt() + torch.finfo(torch.float64).tiny
        return (1 - UNIFORM_SHARE) * guess / guess.sum() + UNIFORM_SHARE / len(guess)

    def _draw(self, num_data: int, run: Run, generator: torch.Generator) -> tuple[int, Draws]:
        grid = self._grid(num_data)
        probabilities = self._probabilities(grid, run)
        uniform = torch.rand((), generator=generator, device=generator.device, dtype=torch.float64).cpu()
        index = int(torch.searchsorted(probabilities.cumsum(0), uniform).clamp_max(len(grid) - 2)) + 1
        # With the exact term on top, the largest matrix of features is the one below it.
        is_exact = self.exact_last and index == len(grid) - 1
        drawn = {"index": torch.tensor(index), "probability": probabilities[index - 1]}
        return int(grid[index - 1] if is_exact else grid[index]), drawn

    def _combined(self, step: FeatureStep, run: Run) -> tuple[FeatureEstimate, Run]:
        grid, index = self._grid(step.num_data), int(step.draws["index"])
        probability = float(step.draws["probability"])
        is_exact = self.exact_last and index == len(grid) - 1
        lower = int(grid[index - 1])
        weights = {self.min_frequencies: 1.0}
        weights[lower] = weights.get(lower, 0.0) - 1 / probability
        if not is_exact:
            weights[int(grid[index])] = 1 / probability
        values = {count: step.leading(count) for count in weights}
        exact = step.exact() if is_exact else None
        upper = values[int(grid[index])].value if exact is None else exact.value.double()
        if self._adapts:
            run = _with_increment(run, len(grid) - 1, index, float((upper - values[lower].value).square().mean()))
        estimate = step.combined(
            [(weight, values[count]) for count, weight in weights.items()],
            FrequencyReport(step.features.num_frequencies, index, probability, is_exact),
            exact=None if exact is None else (1 / probability, exact),
        )
        return estimate, run


def _seen(run: Run, increments: int) -> Draws:
    """How often each increment was drawn before, and the sum of its squares."""
    seen = run.part("increments")
    if seen is None or len(seen["count"]) != increments:
        zeros = torch.zeros(increments, dtype=torch.float64)
        return {"count": zeros, "squares": zeros}
    return {name: tensor.double().cpu() for name, tensor in seen.items()}


def _with_increment(run: Run, increments: int, index: int, square: float) -> Run:
    """The run that has seen one more squared increment."""
    seen = {name: tensor.clone() for name, tensor in _seen(run, increments).items()}
    seen["count"][index - 1] += 1
    seen["squares"][index - 1] += square
    return run.having(increments=seen)


def _check_probabilities(probabilities: Tensor) -> None:
    """ValueError unless they are positive and sum to one."""
    if probabilities.dim() != 1 or not len(probabilities):
        raise ValueError(f"probabilities must be a vector, got the shape {tuple(probabilities.shape)}.")
    if not (torch.isfinite(probabilities) & (probabilities > 0)).all():
        raise ValueError(
            f"probabilities must be positive, got {probabilities.tolist()}: an increment left out is a bias."
        )
    total = float(probabilities.double().sum())
    if abs(total - 1) > 1e-6:
        raise ValueError(f"probabilities must sum to 1, got {total:g}. Divide them by their sum.")

"""Random Fourier features: Phi(x) with E[Phi(x) Phi(x')^T] = k(x, x').

Rahimi and Recht 2007, "Random features for large-scale kernel machines".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative import random_numbers
from gpy_iterative.checks import check_count, check_flag
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.linear_operators.radial_inputs import side_by_side
from gpy_iterative.spectral.densities import GREATEST, SHARE, Draws, draws_under, growth, importance
from gpy_iterative.spectral.summands import Summand, summands

ENTRIES_AT_A_TIME = 2**23


@dataclass(frozen=True)
class RandomFourierFeatures:
    """Random Fourier features.

    Args:
        num_frequencies: m of each summand, which has 2 m features.
        widened: draws more high frequencies, which many data per lengthscale need.

    ConstantKernel, LinearKernel, PolynomialKernel and RFFKernel have exact features. A MultitaskKernel has T consecutive
    rows per point. Batch members share draws.
    """

    num_frequencies: int
    widened: bool = False

    def __post_init__(self) -> None:
        check_count("num_frequencies", self.num_frequencies)
        check_flag("widened", self.widened)

    def draw(self, terms: Sequence[KernelTerm], generator: torch.Generator) -> Draws:
        """Float64 draws, independent of hyperparameters. Raises SpectralDensityMissingError."""
        device = terms[0].inputs.device
        # Float64: one float32 chi-square in 2^24 would be zero, an infinite frequency.
        normal = lambda *shape: random_numbers.normal(shape, generator, device)
        # Quantiles of 0 and 1 are 0 and infinity.
        uniform = lambda *shape: random_numbers.uniform(shape, generator, device).clamp(1e-12, 1 - 1e-12)
        # Summands of a product of sums share factors.
        parts = summands(terms)
        factors = {factor.name: factor for summand in parts for factor in summand.factors}
        draws: Draws = {}
        for name, factor in factors.items():
            dims = factor.inputs.shape[-1]
            drawn = factor.density.draw(factor.kernel, dims, self.num_frequencies, normal, uniform)
            if self.widened:
                drawn = factor.density.widened(factor.kernel, drawn, uniform)
            draws |= {f"{name}.{key}": tensor for key, tensor in drawn.items()}
        light = {name for name, factor in factors.items() if factor.density.has_light_tails}
        if self.widened and light:
            draws |= _grown(parts, light, draws, growth(self.num_frequencies, uniform, GREATEST, SHARE))
        return draws

    @torch.no_grad()
    def features(self, terms: Sequence[KernelTerm], draws: Draws) -> Tensor:
        """Phi [*b, n T, features] for T tasks.

        An entry costs d / 2 multiply-adds and a sine or cosine.
        """
        size, result = terms[0].inputs.shape[-2] * summands(terms)[0].num_tasks, None
        for rows, block in self._blocks(terms, draws):
            result = block.new_empty(*block.shape[:-2], size, block.shape[-1]) if result is None else result
            result[..., rows, :] = block
        return result

    def differentiable(self, terms: Sequence[KernelTerm], draws: Draws) -> Tensor:
        """Phi with its graph, for four times the memory.

        Raises SpectralDensityMissingError for a trained hyperparameter without gradient.
        """
        for summand in summands(terms):
            for factor in summand.factors:
                factor.check_differentiable()
        return torch.cat([block for _, block in self._blocks(terms, draws)], dim=-2)

    def leading(self, terms: Sequence[KernelTerm], num_frequencies: int) -> tuple[Tensor, Tensor]:
        """Columns [k] of the first frequencies, and factors [k] that keep the variance. Raises ValueError."""
        if not 1 <= num_frequencies <= self.num_frequencies:
            raise ValueError(
                f"num_frequencies must lie between 1 and {self.num_frequencies}, the number drawn; got {num_frequencies}."
            )
        device = terms[0].inputs.device
        columns, scales, start = [], [], 0
        for summand in summands(terms):
            own = torch.arange(start, start + summand.num_features(self.num_frequencies), device=device)
            start, scale = start + len(own), 1.0
            if summand.exact is None:  # sines, then cosines, for each column of the tasks' root
                own = own.view(2, -1)[:, : num_frequencies * summand.columns_per_feature].flatten()
                scale = (self.num_frequencies / num_frequencies) ** 0.5
            columns.append(own)
            scales.append(torch.full_like(own, scale, dtype=torch.float64))
        return torch.cat(columns), torch.cat(scales)

    def apply(self, terms: Sequence[KernelTerm], draws: Draws, weights: Tensor) -> Tensor:
        """Phi @ weights [*b, n T, s] for weights [*b, features, s], in their dtype; differentiable in the inputs."""
        return torch.cat([block.to(weights.dtype) @ weights for _, block in self._blocks(terms, draws)], dim=-2)

    def num_features(self, terms: Sequence[KernelTerm]) -> int:
        """Columns of Phi."""
        return sum(summand.num_features(self.num_frequencies) for summand in summands(terms))

    def _blocks(self, terms: Sequence[KernelTerm], draws: Draws) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their blocks of Phi, at least one."""
        parts = []
        for index, summand in enumerate(summands(terms)):
            own = [draws_under(factor.name, draws) for factor in summand.factors]
            frequencies = [factor.frequencies(drawn) for factor, drawn in zip(summand.factors, own, strict=True)]
            own.append(draws_under(f"summand{index}", draws))
            parts.append((summand, frequencies, [drawn["importance"] for drawn in own if "importance" in drawn]))
        step = max(1, ENTRIES_AT_A_TIME // max(1, self.num_features(terms)))
        for start in range(0, max(terms[0].inputs.shape[-2], 1), step):
            rows = slice(start, start + step)
            blocks = [summand.features(rows, frequencies, importance) for summand, frequencies, importance in parts]
            num_tasks = parts[0][0].num_tasks
            rows = slice(start * num_tasks, start * num_tasks + blocks[0].shape[-2])
            yield rows, side_by_side(blocks)


def _grown(parts: Sequence[Summand], light: set[str], draws: Draws, factor: Tensor) -> Draws:
    """The normal draws of light-tailed kernels, squares times `factor`, and the importance of each summand's frequencies.

    Kernels share the factor: a product of Gaussian densities grows as one, with one bounded importance.
    """
    grown = {f"{name}.normal": factor.sqrt() * draws[f"{name}.normal"] for name in light}
    for index, part in enumerate(parts):
        own = [grown[f"{each.name}.normal"] for each in part.factors if each.name in light]
        if own:
            normal = torch.cat(own)
            grown[f"summand{index}.importance"] = importance(normal.square().sum(0), len(normal), GREATEST, SHARE)
    return grown

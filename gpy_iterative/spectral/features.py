"""Random Fourier features of a prior covariance: Phi(x) with E[Phi(x) Phi(x')^T] = k(x, x').

The kernel's tree is multiplied out into summands (`summands.py`); their randomness, a flat dict of tensors, is drawn once
for unit lengthscales and rescaled with the hyperparameters at every evaluation. Rahimi and Recht 2007, "Random features for
large-scale kernel machines".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.spectral.densities import Draws, draws_under
from gpy_iterative.spectral.summands import Summand, summands

#: Entries of a feature matrix that are held at a time where the whole is not needed.
ENTRIES_AT_A_TIME = 2**23


@dataclass(frozen=True)
class RandomFourierFeatures:
    """Random Fourier features of a sum of kernels.

    Args:
        num_frequencies: frequencies m of each summand, which has 2 m features.

    A LinearKernel, PolynomialKernel or RFFKernel has its exact features instead. A product adds the independent
    frequencies of its factors. A MultitaskKernel has the features of its data kernel for every column of a root of its
    task covariance, and T rows for each point, tasks of a point together. All members of a batch share the draws.

    Phases are computed in float64 whatever the dtype: heavy-tailed densities draw frequencies of 1e6 and more.
    """

    num_frequencies: int

    def __post_init__(self) -> None:
        check_count("num_frequencies", self.num_frequencies)

    def draw(self, terms: Sequence[KernelTerm], generator: torch.Generator) -> Draws:
        """Randomness for one prior: float64 tensors, independent of the hyperparameters and of the number of data.

        Raises:
            SpectralDensityMissingError: a kernel of the sum has no registered spectral density.
        """
        device = terms[0].inputs.device

        # In float64: float32 draws a chi-square of exactly zero, an infinite frequency, once in 2^24.
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64).to(device)

        def uniform(*shape: int) -> Tensor:
            draws = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
            # Away from 0 and 1, whose quantiles are 0 and infinity.
            return draws.clamp(1e-12, 1 - 1e-12).to(device)

        # A factor of a product of sums belongs to several summands, with the same frequencies.
        factors = {factor.name: factor for summand in summands(terms) for factor in summand.factors}
        draws: Draws = {}
        for name, factor in factors.items():
            dims = factor.inputs.shape[-1]
            drawn = factor.density.draw(factor.kernel, dims, self.num_frequencies, normal, uniform)
            draws |= {f"{name}.{key}": tensor for key, tensor in drawn.items()}
        return draws

    @torch.no_grad()
    def features(self, terms: Sequence[KernelTerm], draws: Draws) -> Tensor:
        """Phi [*b, n, features] at the inputs of the terms and the current hyperparameters (n T rows for T tasks).

        Cost n features d / 2 multiply-adds and n features sines and cosines; memory beyond the result is small.
        """
        blocks = self._blocks(terms, draws)
        rows, block = next(blocks)
        size = terms[0].inputs.shape[-2] * summands(terms)[0].num_tasks
        if block.shape[-2] == size:
            return block
        result = block.new_empty(*block.shape[:-2], size, block.shape[-1])
        result[..., rows, :] = block
        for rows, block in blocks:
            result[..., rows, :] = block
        return result

    def differentiable(self, terms: Sequence[KernelTerm], draws: Draws) -> Tensor:
        """Phi [*b, n, features] with the graph to the inputs and hyperparameters: about four times the memory of Phi.

        Raises:
            SpectralDensityMissingError: a hyperparameter is trained that frequencies are not differentiable in.
        """
        for summand in summands(terms):
            for factor in summand.factors:
                factor.check_differentiable()
        blocks = [block for _, block in self._blocks(terms, draws)]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-2)

    def leading(self, terms: Sequence[KernelTerm], num_frequencies: int) -> tuple[Tensor, Tensor]:
        """The features of the first `num_frequencies` frequencies.

        Returns:
            Their columns of Phi [k], and a factor for each of these columns [k]: with fewer frequencies each counts for
            more.

        Raises:
            ValueError: more frequencies than there are.
        """
        if not 1 <= num_frequencies <= self.num_frequencies:
            raise ValueError(
                f"num_frequencies must lie between 1 and {self.num_frequencies}, the number drawn; got {num_frequencies}."
            )
        device = terms[0].inputs.device
        columns, scales, start = [], [], 0
        for summand in summands(terms):
            size = summand.num_features(self.num_frequencies)
            scale = 1.0
            own = torch.arange(start, start + size, device=device)
            if summand.exact is None:  # sines, then cosines, each as often as there are columns of the tasks' root
                length = summand.columns_per_feature
                halves = own.split(self.num_frequencies * length)
                own = torch.cat([half[: num_frequencies * length] for half in halves])
                scale = (self.num_frequencies / num_frequencies) ** 0.5
            columns.append(own)
            scales.append(torch.full((len(own),), scale, dtype=torch.float64, device=device))
            start += size
        return torch.cat(columns), torch.cat(scales)

    def apply(self, terms: Sequence[KernelTerm], draws: Draws, weights: Tensor) -> Tensor:
        """Phi @ weights [*b, n, s], a few thousand rows at a time, differentiable in the inputs of the terms.

        Args:
            terms: any inputs, test points too.
            draws: from `draw`.
            weights: [*b, features, s].
        """
        return torch.cat([block @ weights for _, block in self._blocks(terms, draws)], dim=-2)

    def num_features(self, terms: Sequence[KernelTerm]) -> int:
        """The number of columns of Phi."""
        return sum(summand.num_features(self.num_frequencies) for summand in summands(terms))

    def _blocks(self, terms: Sequence[KernelTerm], draws: Draws) -> Iterator[tuple[slice, Tensor]]:
        """Phi in blocks of rows, and which rows; one empty block for no rows."""
        parts = [(summand, _frequencies(summand, draws)) for summand in summands(terms)]
        step = max(1, ENTRIES_AT_A_TIME // max(1, self.num_features(terms)))
        for start in range(0, max(terms[0].inputs.shape[-2], 1), step):
            rows = slice(start, start + step)
            blocks = [summand.features(rows, frequencies) for summand, frequencies in parts]
            batch = torch.broadcast_shapes(*(block.shape[:-2] for block in blocks))
            num_tasks = parts[0][0].num_tasks
            rows = slice(start * num_tasks, start * num_tasks + blocks[0].shape[-2])
            yield rows, torch.cat([block.expand(*batch, *block.shape[-2:]) for block in blocks], dim=-1)


def _frequencies(summand: Summand, draws: Draws) -> list[Tensor]:
    """Omega [*b, d, m] of each factor, at its current lengthscale; once an evaluation, for all rows."""
    return [factor.frequencies(draws_under(factor.name, draws)) for factor in summand.factors]

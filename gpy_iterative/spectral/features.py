"""Random Fourier features of a prior covariance: Phi(x) with E[Phi(x) Phi(x')^T] = k(x, x').

The tree of kernels that a prior is (sums, scales, products of kernels with a spectral density) is walked twice: once
to draw the randomness, a flat dict of tensors, and at every evaluation to rescale it with the hyperparameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch import kernels
from torch import Tensor

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators import KernelTerm
from gpy_iterative.spectral.densities import Draws, spectral_density

#: Rows of a feature matrix that are held at a time where the whole is not needed.
ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class RandomFourierFeatures:
    """The features of a sum of kernels.

    Args:
        num_frequencies: frequencies of each term of the sum; a term has twice as many features.

    A term of a LinearKernel has its exact features instead. A product adds the independent frequencies of its factors.
    All members of a batch share the draws.
    """

    num_frequencies: int

    def __post_init__(self) -> None:
        if self.num_frequencies < 1:
            raise ValueError(f"num_frequencies must be at least 1, got {self.num_frequencies}.")

    def draw(self, terms: Sequence[KernelTerm], generator: torch.Generator) -> Draws:
        """Randomness for one prior.

        Raises:
            SpectralDensityMissingError: a kernel of the sum has no registered spectral density.
        """
        like = terms[0].inputs

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=generator.device, dtype=like.dtype).to(like.device)

        def uniform(*shape: int) -> Tensor:
            draws = torch.rand(*shape, generator=generator, device=generator.device, dtype=torch.float64)
            # Away from 0 and 1, whose quantiles are 0 and infinity.
            return draws.clamp(1e-12, 1 - 1e-12).to(like)

        draws: Draws = {}
        for name, leaf, _, dims in self._leaves(terms):
            density = spectral_density(leaf)
            assert density is not None
            drawn = density.draw(leaf, dims, self.num_frequencies, normal, uniform)
            draws |= {f"{name}.{key}": tensor for key, tensor in drawn.items()}
        return draws

    @torch.no_grad()
    def features(self, terms: Sequence[KernelTerm], draws: Draws) -> Tensor:
        """Phi [*b, n, features] at the inputs of the terms and the current hyperparameters. Cost n d features."""
        return self._features(terms, draws)

    def apply(self, terms: Sequence[KernelTerm], draws: Draws, weights: Tensor) -> Tensor:
        """Phi @ weights [*b, n, s], a few thousand rows at a time, differentiable in the inputs of the terms."""
        parts = []
        for start in range(0, max(terms[0].inputs.shape[-2], 1), ROWS_AT_A_TIME):
            rows = [
                KernelTerm(term.kernel, term.inputs[..., start : start + ROWS_AT_A_TIME, :], term.scale)
                for term in terms
            ]
            parts.append(self._features(rows, draws) @ weights)
        return torch.cat(parts, dim=-2)

    def num_features(self, terms: Sequence[KernelTerm]) -> int:
        """The number of columns of Phi."""
        empty = [KernelTerm(term.kernel, term.inputs[..., :0, :], term.scale) for term in terms]
        generator = torch.Generator().manual_seed(0)
        return self.features(empty, self.draw(empty, generator)).shape[-1]

    def _features(self, terms: Sequence[KernelTerm], draws: Draws) -> Tensor:
        parts = []
        for index, term in enumerate(terms):
            for part in _expand(f"term{index}", term.kernel, term.inputs, term.scale):
                parts.append(part.features(draws, self.num_frequencies))
        batch = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
        return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in parts], dim=-1)

    def _leaves(self, terms: Sequence[KernelTerm]) -> list[tuple[str, kernels.Kernel, Tensor, int]]:
        return [
            (name, leaf, inputs, inputs.shape[-1])
            for index, term in enumerate(terms)
            for part in _expand(f"term{index}", term.kernel, term.inputs, term.scale)
            for name, leaf, inputs in part.factors
        ]


def has_random_features(kernel: kernels.Kernel) -> bool:
    """Whether RandomFourierFeatures can be drawn for this kernel."""
    if isinstance(kernel, kernels.ScaleKernel):
        return has_random_features(kernel.base_kernel)
    if isinstance(kernel, kernels.AdditiveKernel):
        return all(has_random_features(child) for child in kernel.kernels)
    if isinstance(kernel, kernels.ProductKernel):
        return all(has_random_features(child) and not _has_linear(child) for child in kernel.kernels)
    return type(kernel) is kernels.LinearKernel or spectral_density(kernel) is not None


def _has_linear(kernel: kernels.Kernel) -> bool:
    return any(type(part) is kernels.LinearKernel for part in kernel.modules())


@dataclass(frozen=True)
class _Part:
    """One summand: a scale times a product of leaf kernels (or a linear kernel alone)."""

    scale: Tensor | None
    factors: list[tuple[str, kernels.Kernel, Tensor]]
    linear: tuple[kernels.LinearKernel, Tensor] | None = None

    def features(self, draws: Draws, num_frequencies: int) -> Tensor:
        if self.linear is not None:
            kernel, inputs = self.linear
            result = inputs * kernel.variance.sqrt()
        else:
            result = _trigonometric(self.factors, draws, num_frequencies)
        if self.scale is not None:
            result = result * self.scale.sqrt().unsqueeze(-1).unsqueeze(-1)
        return result


def _trigonometric(factors: list[tuple[str, kernels.Kernel, Tensor]], draws: Draws, num_frequencies: int) -> Tensor:
    phase: Tensor | None = None
    for name, leaf, inputs in factors:
        density = spectral_density(leaf)
        assert density is not None
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in draws.items() if key.startswith(f"{name}.")}
        # Frequencies of heavy-tailed densities make large phases, whose sine float32 does not know.
        omega = density.frequencies(leaf, own).double()
        part = (inputs / leaf.lengthscale).double() @ omega
        phase = part if phase is None else phase + part
    assert phase is not None
    dtype = factors[0][2].dtype
    # Reduced to one turn in float64, where it still has digits; sine and cosine in the inputs' own type.
    phase = torch.remainder(phase, 2 * torch.pi).to(dtype)
    return torch.cat([phase.sin(), phase.cos()], dim=-1) / num_frequencies**0.5


def _expand(name: str, kernel: kernels.Kernel, inputs: Tensor, scale: Tensor | None) -> list[_Part]:
    """The kernel as a sum of scaled products of leaves."""
    if isinstance(kernel, kernels.ScaleKernel):
        factor = kernel.outputscale
        scale = factor if scale is None else scale * factor
        return _expand(f"{name}.base", kernel.base_kernel, inputs, scale)
    if isinstance(kernel, kernels.AdditiveKernel):
        return [
            part
            for index, child in enumerate(kernel.kernels)
            for part in _expand(f"{name}.{index}", child, _active(child, inputs), scale)
        ]
    if isinstance(kernel, kernels.ProductKernel):
        parts = [_Part(scale, [])]
        for index, child in enumerate(kernel.kernels):
            expanded = _expand(f"{name}.{index}", child, _active(child, inputs), None)
            parts = [_times(left, right, child) for left in parts for right in expanded]
        return parts
    if type(kernel) is kernels.LinearKernel:
        return [_Part(scale, [], (kernel, inputs))]
    if spectral_density(kernel) is None:
        raise _missing(kernel)
    return [_Part(scale, [(name, kernel, inputs)])]


def _times(left: _Part, right: _Part, kernel: kernels.Kernel) -> _Part:
    if left.linear is not None or right.linear is not None:
        raise _missing(kernel)
    scales = [scale for scale in (left.scale, right.scale) if scale is not None]
    scale = None if not scales else scales[0] if len(scales) == 1 else scales[0] * scales[1]
    return _Part(scale, left.factors + right.factors)


def _active(kernel: kernels.Kernel, inputs: Tensor) -> Tensor:
    return inputs if kernel.active_dims is None else inputs.index_select(-1, kernel.active_dims)


def _missing(kernel: kernels.Kernel) -> SpectralDensityMissingError:
    return SpectralDensityMissingError(
        f"{type(kernel).__name__} has no registered spectral density here, so no random features. Register one with "
        "gpy_iterative.spectral.register_spectral_density, or take HutchinsonMarginalLogLikelihood, which needs none; "
        "PathwiseMarginalLogLikelihood(prior='exact') serves small data."
    )

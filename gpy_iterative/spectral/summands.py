"""A prior's kernels multiplied out: a sum of scaled products of kernels with a spectral density, or with exact features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from gpytorch import kernels
from linear_operator.operators import RootLinearOperator
from torch import Tensor

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.from_gpytorch import active_inputs
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.spectral.densities import Draws, SpectralDensity, spectral_density

#: Kernels whose `forward` is an explicit root Phi Phi^T; by exact type, as a subclass may compute anything.
_EXACT = (kernels.LinearKernel, kernels.RFFKernel)


@dataclass(frozen=True)
class Factor:
    """A stationary kernel at the inputs that it sees.

    Attributes:
        name: its place in the tree, under which its randomness is kept.
        kernel: the kernel.
        inputs: [*b, n, d], reduced to its active dimensions.
        density: of its frequencies.
    """

    name: str
    kernel: kernels.Kernel
    inputs: Tensor
    density: SpectralDensity

    def frequencies(self, draws: Draws) -> Tensor:
        """Omega [*b, d, m] in float64, divided by the lengthscale."""
        omega = self.density.frequencies(self.kernel, draws).double()
        return omega / self.kernel.lengthscale.double().mT if self.kernel.has_lengthscale else omega

    def check_differentiable(self) -> None:
        """SpectralDensityMissingError where a parameter is trained that the frequencies have no gradient in."""
        for name in self.density.without_gradient:
            if getattr(self.kernel, name).requires_grad:
                raise SpectralDensityMissingError(
                    f"The frequencies of {type(self.kernel).__name__} have no gradient in its parameter {name}. Fix it "
                    f"(kernel.{name}.requires_grad_(False)), or take RussianRouletteMarginalLogLikelihood or "
                    "HutchinsonMarginalLogLikelihood, which need no random features."
                )


@dataclass(frozen=True)
class Summand:
    """A scale times a product of stationary kernels, or times one kernel with exact features.

    Attributes:
        scale: [*b], or None for 1.
        factors: of the product; empty where `exact` is given.
        exact: a kernel with finitely many features, and its inputs.
    """

    scale: Tensor | None
    factors: list[Factor]
    exact: tuple[kernels.Kernel, Tensor] | None = None

    def num_features(self, num_frequencies: int) -> int:
        """Columns of `features`."""
        return 2 * num_frequencies if self.exact is None else self.features(slice(0, 0), []).shape[-1]

    def features(self, rows: slice, frequencies: list[Tensor]) -> Tensor:
        """Phi [*b, rows, features] for the frequencies of each factor."""
        if self.exact is not None:
            kernel, inputs = self.exact
            points = inputs[..., rows, :]
            result = cast(RootLinearOperator, kernel.forward(points, points)).root.to_dense()
        else:
            result = self._trigonometric(rows, frequencies)
        if self.scale is None:
            return result
        # A scale that has underflowed to zero is kept away from it: the root has no finite slope there.
        root = self.scale.masked_fill(self.scale == 0, torch.finfo(self.scale.dtype).tiny).sqrt()
        return result * root.unsqueeze(-1).unsqueeze(-1)

    def _trigonometric(self, rows: slice, frequencies: list[Tensor]) -> Tensor:
        phase = torch.zeros((), dtype=torch.float64, device=frequencies[0].device)
        for factor, omega in zip(self.factors, frequencies, strict=True):
            # Independent frequencies of a product's factors add up: cosines of sums are products of cosines, on average.
            phase = phase + factor.inputs[..., rows, :].double() @ omega
        phase = torch.remainder(phase, 2 * torch.pi).to(self.factors[0].inputs.dtype)
        return torch.cat([phase.sin(), phase.cos()], dim=-1) / frequencies[0].shape[-1] ** 0.5


def summands(terms: Sequence[KernelTerm]) -> list[Summand]:
    """A sum of kernels, multiplied out.

    Raises:
        SpectralDensityMissingError: a kernel has neither a spectral density nor exact features, or a factor of a product
            has exact features.
    """
    return [
        part
        for index, term in enumerate(terms)
        for part in _expand(f"term{index}", term.kernel, term.inputs, term.scale)
    ]


def has_random_features(kernel: kernels.Kernel) -> bool:
    """Whether RandomFourierFeatures can be drawn for this kernel."""
    if type(kernel) is kernels.ScaleKernel:
        return has_random_features(kernel.base_kernel)
    if type(kernel) is kernels.AdditiveKernel:
        return all(has_random_features(child) for child in kernel.kernels)
    if type(kernel) is kernels.ProductKernel:
        return all(has_random_features(child) and not _has_exact_part(child) for child in kernel.kernels)
    return type(kernel) in _EXACT or spectral_density(kernel) is not None


def _has_exact_part(kernel: kernels.Kernel) -> bool:
    return any(type(part) in _EXACT for part in kernel.modules())


def _expand(name: str, kernel: kernels.Kernel, inputs: Tensor, scale: Tensor | None) -> list[Summand]:
    # By exact type: a subclass may compute anything.
    if type(kernel) is kernels.ScaleKernel:
        # Its forward calls the base's forward: the base's active dimensions are its own, applied already.
        return _expand(f"{name}.base", kernel.base_kernel, inputs, _product(scale, kernel.outputscale))
    if type(kernel) is kernels.AdditiveKernel:
        return [
            part
            for index, child in enumerate(kernel.kernels)
            for part in _expand(f"{name}.{index}", child, active_inputs(child, inputs), scale)
        ]
    if type(kernel) is kernels.ProductKernel:
        parts = [Summand(scale, [])]
        for index, child in enumerate(kernel.kernels):
            expanded = _expand(f"{name}.{index}", child, active_inputs(child, inputs), None)
            parts = [_times(left, right) for left in parts for right in expanded]
        return parts
    if type(kernel) in _EXACT:
        return [Summand(scale, [], (kernel, inputs))]
    density = spectral_density(kernel)
    if density is None:
        raise _missing(kernel)
    return [Summand(scale, [Factor(name, kernel, inputs, density)])]


def _times(left: Summand, right: Summand) -> Summand:
    for side in (left, right):
        if side.exact is not None:
            raise _missing(side.exact[0], "as a factor of a product")
    return Summand(_product(left.scale, right.scale), left.factors + right.factors)


def _product(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left * right


def _missing(kernel: kernels.Kernel, where: str = "here") -> SpectralDensityMissingError:
    return SpectralDensityMissingError(
        f"{type(kernel).__name__} has no registered spectral density {where}, so no random features. Register one with "
        "gpy_iterative.spectral.register_spectral_density. Without them HutchinsonMarginalLogLikelihood trains, "
        "posterior(x).rsample() draws from its posterior, and PathwiseMarginalLogLikelihood(prior='exact') serves small "
        "data."
    )

"""Priors as sums of products of stationary kernels, and of kernels with exact features."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from gpytorch import kernels
from torch import Tensor

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.linear_operators.radial_inputs import active_inputs, value_dtype
from gpy_iterative.spectral.densities import Draws, SpectralDensity, spectral_density
from gpy_iterative.spectral.finite import feature_map

_SUMS = (kernels.AdditiveKernel, kernels.AdditiveStructureKernel, kernels.LCMKernel)
_PRODUCTS = (kernels.ProductKernel, kernels.ProductStructureKernel)
_EXACT = (kernels.ConstantKernel, kernels.LinearKernel, kernels.PolynomialKernel, kernels.RFFKernel)


@dataclass(frozen=True)
class Factor:
    """A stationary kernel.

    Attributes:
        name: prefix of its draws.
        inputs: [*b, n, d], active dimensions only.
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
        for name in self.density.without_gradient:
            if getattr(self.kernel, name).requires_grad:
                raise SpectralDensityMissingError(
                    f"The frequencies of {type(self.kernel).__name__} have no gradient in its parameter {name}. Fix it "
                    f"(kernel.{name}.requires_grad_(False)), or take RussianRouletteMarginalLogLikelihood or "
                    "HutchinsonMarginalLogLikelihood, which need no random features."
                )


@dataclass(frozen=True)
class Summand:
    """A scaled product of stationary kernels, or kernel with exact features.

    Attributes:
        scale: [*b], or None for 1.
        factors: empty with `exact`.
        exact: a kernel and its inputs.
        tasks: root [*b, T, r] of a task covariance.
    """

    scale: Tensor | None
    factors: list[Factor]
    exact: tuple[kernels.Kernel, Tensor] | None = None
    tasks: Tensor | None = None

    @property
    def num_tasks(self) -> int:
        """Rows per point."""
        return 1 if self.tasks is None else self.tasks.shape[-2]

    @property
    def columns_per_feature(self) -> int:
        """Columns of the task root."""
        return 1 if self.tasks is None else self.tasks.shape[-1]

    def num_features(self, num_frequencies: int) -> int:
        """Columns of `features`."""
        if self.exact is not None:
            return self.features(slice(0, 0), []).shape[-1]
        return 2 * num_frequencies * self.columns_per_feature

    def features(self, rows: slice, frequencies: list[Tensor], importance: Sequence[Tensor] = ()) -> Tensor:
        """Phi [*b, rows T, features]; the tasks of a point are consecutive."""
        if self.exact is not None:
            kernel, inputs = self.exact
            result = feature_map(kernel)(inputs[..., rows, :]).scaled()
        else:
            result = self._trigonometric(rows, frequencies, importance)
        if self.tasks is not None:
            result = torch.einsum("...nf,...tr->...ntfr", result, self.tasks.to(result)).flatten(-4, -3).flatten(-2)
        if self.scale is None:
            return result
        # At an underflowed scale the root has an infinite slope.
        root = self.scale.masked_fill(self.scale == 0, torch.finfo(self.scale.dtype).tiny).sqrt()
        return result * root.unsqueeze(-1).unsqueeze(-1)

    def _trigonometric(self, rows: slice, frequencies: list[Tensor], importance: Sequence[Tensor]) -> Tensor:
        phase = torch.zeros((), dtype=torch.float64, device=frequencies[0].device)
        for factor, omega in zip(self.factors, frequencies, strict=True):
            # Frequencies add: E cos(a + b) = E cos(a) E cos(b) for independent symmetric a, b. They may exceed 1e6, hence
            # float64.
            phase = phase + factor.inputs[..., rows, :].double() @ omega
        phase = torch.remainder(phase, 2 * torch.pi).to(value_dtype(self.factors[0].kernel, self.factors[0].inputs))
        root = (frequencies[0].shape[-1] / prod(weights.to(phase) for weights in importance)) ** 0.5
        return torch.cat([phase.sin() / root, phase.cos() / root], dim=-1)


def summands(terms: Sequence[KernelTerm]) -> list[Summand]:
    """A sum of kernels, multiplied out.

    Raises:
        SpectralDensityMissingError: a kernel without features; exact features or tasks in a product.
    """
    return [
        part
        for index, term in enumerate(terms)
        for part in _expand(f"term{index}", term.kernel, term.inputs, term.scale)
    ]


def _expand(name: str, kernel: kernels.Kernel, inputs: Tensor, scale: Tensor | None) -> list[Summand]:
    # Exact types: a subclass may compute anything. ScaleKernel, LCMKernel and MultitaskKernel call `forward` of their
    # parts, which ignores active dimensions.
    if type(kernel) is kernels.ScaleKernel:
        return _expand(f"{name}.base", kernel.base_kernel, inputs, _product(scale, kernel.outputscale))
    if type(kernel) in _SUMS:
        parts = enumerate(_parts(kernel, inputs))
        return [summand for i, part in parts for summand in _expand(f"{name}.{i}", *part, scale)]
    if type(kernel) in _PRODUCTS:
        factors = [_expand(f"{name}.{i}", *part, None) for i, part in enumerate(_parts(kernel, inputs))]
        return _multiplied_out(scale, factors)
    if type(kernel) is kernels.MultitaskKernel:
        covariance = kernel.task_covar_module  # B B^T + diag(v)
        tasks = torch.cat([covariance.covar_factor, torch.diag_embed(covariance.var.sqrt())], dim=-1)
        return [replace(part, tasks=tasks) for part in _expand(f"{name}.data", kernel.data_covar_module, inputs, scale)]
    if type(kernel) in _EXACT:
        return [Summand(scale, [], (kernel, inputs))]
    density = spectral_density(kernel)
    if density is None:
        raise _missing(kernel)
    return [Summand(_product(scale, density.variance(kernel)), [Factor(name, kernel, inputs, density)])]


def _parts(kernel: Any, inputs: Tensor) -> list[tuple[kernels.Kernel, Tensor]]:
    """Kernels of a sum or product, and their inputs."""
    if type(kernel) is kernels.LCMKernel:
        return [(child, inputs) for child in kernel.covar_module_list]
    if type(kernel) in (kernels.AdditiveKernel, kernels.ProductKernel):
        return [(child, active_inputs(child, inputs)) for child in kernel.kernels]
    base = kernel.base_kernel
    if base.batch_shape:
        raise _missing(kernel, "with a kernel of its own for each dimension")
    return [(base, column) for column in active_inputs(base, inputs).split(1, dim=-1)]


def _multiplied_out(scale: Tensor | None, factors: Sequence[Sequence[Summand]]) -> list[Summand]:
    parts = [Summand(scale, [])]
    for expanded in factors:
        parts = [_times(left, right) for left in parts for right in expanded]
    return parts


def _times(left: Summand, right: Summand) -> Summand:
    for side in (left, right):
        if side.exact is not None:
            raise _missing(side.exact[0], "as a factor of a product")
        if side.tasks is not None:
            raise _missing(side.factors[0].kernel, "as a factor of a product of several tasks")
    return Summand(_product(left.scale, right.scale), left.factors + right.factors)


def _product(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left * right


def _missing(kernel: kernels.Kernel, where: str = "here") -> SpectralDensityMissingError:
    return SpectralDensityMissingError(
        f"{type(kernel).__name__} has no registered spectral density {where}, so no random features. Register one with "
        "gpy_iterative.spectral.register_spectral_density, or train with HutchinsonMarginalLogLikelihood (for small data "
        "PathwiseMarginalLogLikelihood(prior='exact')) and draw with posterior(x).rsample(). Quadruply stochastic models "
        "take any kernel by a NystromBasis without a tail."
    )

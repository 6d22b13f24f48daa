"""Spectral densities at unit lengthscale: draws stay valid in training."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from gpytorch import kernels
from scipy.special import gammaincinv
from torch import Tensor

from gpy_iterative.linear_operators.radial_inputs import computes_the_same

Draws = dict[str, Tensor]

#: Least factor of a widened chi-square or tail probability; frequencies of the first grow by up to 10,000.
SMALLEST = 1e-8
#: Largest growth of the square of a normal draw, and the share of frequencies that grow. Data determine frequencies of a
#: density above about noise / n; grown ones reach exp(-25) of its maximum in one dimension, less in more.
GREATEST, SHARE = 50.0, 0.25


def draws_under(prefix: str, draws: Draws) -> Draws:
    """The draws `prefix.rest`, renamed to `rest`."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in draws.items() if name.startswith(start)}


class SpectralDensity(ABC):
    """The distribution of omega in k(x - x') = E[cos(omega^T (x - x') / lengthscale)].

    Attributes:
        without_gradient: kernel parameters in which `frequencies` has no gradient.
        has_light_tails: whether `frequencies` is large only where the draw "normal" [dims, count] is.
    """

    without_gradient: ClassVar[tuple[str, ...]] = ()
    has_light_tails: ClassVar[bool] = False

    @abstractmethod
    def draw(self, kernel: kernels.Kernel, dims: int, count: int, normal: Callable, uniform: Callable) -> Draws:
        """Draws for `count` frequencies, independent of hyperparameters.

        `normal` and `uniform` (in (0, 1)) take a shape and return float64 draws.
        """

    @abstractmethod
    def frequencies(self, kernel: kernels.Kernel, draws: Draws) -> Tensor:
        """Omega [*b, dims, count] at the current shape parameters and unit lengthscale."""

    def variance(self, kernel: kernels.Kernel) -> Tensor | None:
        """The prior variance k(x, x) [*b]; None for 1."""
        return None

    def widened(self, kernel: kernels.Kernel, draws: Draws, uniform: Callable) -> Draws:
        """Draws with more high frequencies, and "importance" [count]: old over new density. By default unchanged."""
        return draws


_REGISTRY: dict[type[kernels.Kernel], SpectralDensity] = {}


def register_spectral_density(kernel_class: type[kernels.Kernel]) -> Callable[[type], type]:
    """Class decorator: registers the density of a kernel class whose `lengthscale`, if any, divides its inputs.

    Subclasses share it unless they override `forward`, `__call__`, `covar_dist` or `lengthscale`.
    """

    def register(density_class: type[SpectralDensity]) -> type[SpectralDensity]:
        _REGISTRY[kernel_class] = density_class()
        return density_class

    return register


def spectral_density(kernel: kernels.Kernel) -> SpectralDensity | None:
    """The registered density, or None."""
    for kernel_class in type(kernel).__mro__:
        if kernel_class in _REGISTRY:
            return _REGISTRY[kernel_class] if computes_the_same(kernel, kernel_class) else None
    return None


@register_spectral_density(kernels.keops.RBFKernel)
@register_spectral_density(kernels.RBFKernel)
class Gaussian(SpectralDensity):
    """Standard normal frequencies."""

    has_light_tails = True

    def draw(self, kernel: kernels.Kernel, dims: int, count: int, normal: Callable, uniform: Callable) -> Draws:
        return {"normal": normal(dims, count)}

    def frequencies(self, kernel: kernels.Kernel, draws: Draws) -> Tensor:
        return draws["normal"]


@register_spectral_density(kernels.keops.MaternKernel)
@register_spectral_density(kernels.MaternKernel)
class StudentT(SpectralDensity):
    """Multivariate t with 2 nu degrees of freedom."""

    def draw(self, kernel: kernels.Kernel, dims: int, count: int, normal: Callable, uniform: Callable) -> Draws:
        degrees = round(2 * kernel.nu)
        return {"normal": normal(dims, count), "chi_square": normal(degrees, count).square().sum(0)}

    def frequencies(self, kernel: kernels.Kernel, draws: Draws) -> Tensor:
        return draws["normal"] * (2 * kernel.nu / draws["chi_square"]).sqrt()

    def widened(self, kernel: kernels.Kernel, draws: Draws, uniform: Callable) -> Draws:
        # Half of the chi-squares shrink by a factor, log-uniform between SMALLEST and 1.
        degrees, chi_square = round(2 * kernel.nu), draws["chi_square"]
        chi_square = growth(len(chi_square), uniform, SMALLEST, 0.5) * chi_square
        return draws | {"chi_square": chi_square, "importance": importance(chi_square, degrees, SMALLEST, 0.5)}


@register_spectral_density(kernels.RQKernel)
class GammaMixture(SpectralDensity):
    """Normal frequencies times sqrt(u), u ~ Gamma(alpha, alpha)."""

    without_gradient = ("raw_alpha",)
    has_light_tails = True

    def draw(self, kernel: kernels.Kernel, dims: int, count: int, normal: Callable, uniform: Callable) -> Draws:
        return {"normal": normal(dims, count), "uniform": uniform(count)}

    def frequencies(self, kernel: kernels.Kernel, draws: Draws) -> Tensor:
        return draws["normal"] * gamma_quantile(draws["uniform"], kernel.alpha).sqrt().unsqueeze(-2)

    def widened(self, kernel: kernels.Kernel, draws: Draws, uniform: Callable) -> Draws:
        # High frequencies have a large u, too: half of the probabilities above u shrink as chi-squares do.
        tail = growth(len(draws["uniform"]), uniform, SMALLEST, 0.5) * (1 - draws["uniform"])
        wide = (1 / tail.clamp_min(SMALLEST) - 1) / -math.log(SMALLEST)  # the density of those that shrink
        return draws | {"uniform": 1 - tail, "importance": 1 / (0.5 + 0.5 * wide)}


@register_spectral_density(kernels.SpectralMixtureKernel)
class SpectralMixture(SpectralDensity):
    """A symmetric mixture of normal distributions."""

    without_gradient = ("raw_mixture_weights",)
    has_light_tails = True

    def draw(self, kernel: kernels.Kernel, dims: int, count: int, normal: Callable, uniform: Callable) -> Draws:
        return {"normal": normal(dims, count), "uniform": uniform(dims, count), "sign": normal(dims, count).sign()}

    def frequencies(self, kernel: kernels.Kernel, draws: Draws) -> Tensor:
        weights = kernel.mixture_weights.detach().double()
        shares = weights.cumsum(-1)[..., :-1] / weights.sum(-1, keepdim=True)
        component = (draws["uniform"].unsqueeze(-1) > shares.unsqueeze(-2).unsqueeze(-2)).sum(-1)  # [*b, d, m]
        mean, scale = (
            values.squeeze(-2).mT.double().gather(-1, component)
            for values in (kernel.mixture_means, kernel.mixture_scales)
        )
        return 2 * torch.pi * (draws["sign"] * mean + scale * draws["normal"])

    def variance(self, kernel: kernels.Kernel) -> Tensor:
        return kernel.mixture_weights.sum(-1) ** kernel.ard_num_dims


def importance(chi_square: Tensor, degrees: int, greatest: float, share: float) -> Tensor:
    """Old over new density of chi-squares of which a share has a factor, log-uniform between 1 and `greatest`."""
    half, point = torch.full_like(chi_square, degrees / 2), chi_square / 2
    # Densities without and with the factor, times the chi-square.
    density = (half * point.log() - point - torch.lgamma(half)).exp()
    below = torch.special.gammainc(half, point) - torch.special.gammainc(half, point / greatest)
    above = torch.special.gammaincc(half, point / greatest) - torch.special.gammaincc(half, point)
    wide = torch.where(point < half, below, above) / math.log(greatest)  # the one without cancellation
    return density / ((1 - share) * density + share * wide)


def growth(count: int, uniform: Callable, greatest: float, share: float) -> Tensor:
    """Factors [count]: 1, and for a share log-uniform between 1 and `greatest`; one of each stratum, in random order."""
    within, order = uniform(2, count)
    place = (order.argsort() + within) / count
    return greatest ** (1 - (1 - place) / share).clamp_min(0)


def gamma_quantile(probability: Tensor, alpha: Tensor) -> Tensor:
    """Quantiles [*b, count] of Gamma(alpha, rate alpha) for probabilities [count] and alpha [*b, 1], without gradient."""
    shape = alpha.detach().double()
    quantile = gammaincinv(shape.cpu().numpy(), probability.double().cpu().numpy())
    return (torch.as_tensor(quantile, device=shape.device) / shape).to(probability.dtype)

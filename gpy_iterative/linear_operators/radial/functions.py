"""Radial kernels as functions of a squared distance: k(x, x') = outputscale * f(q), q = |x - x'|^2.

Element-wise work is most of a product's cost, so formulas work in place.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeOpsFormulas:
    """A radial function in KeOps' language (https://www.kernel-operations.io/keops/api/math-operations.html).

    KeOps rounds fractions to float32; halves are exact.

    Attributes:
        value: f, of `{u}` and `alpha`.
        derivative: df/dq (not df/du); 0 at u = 0 where the true one is unbounded.
        alpha_derivative: df/dalpha at fixed q, or None.
    """

    value: str
    derivative: str
    alpha_derivative: str | None = None


#: Largest r in exp(-r): next to 0 even times squared distances of 1e10 lengthscales (time stamps), and no denormal number.
FARTHEST = 68.0
_LOG2_E = math.log2(math.e)


def _decay(r: Tensor, out: Tensor | None = None) -> Tensor:
    # exp2 is faster than exp on a CPU.
    return torch.mul(r, -_LOG2_E, out=out).exp2_()


def _one_plus_r(exponents: Tensor, exponential: Tensor, out: Tensor) -> Tensor:
    """(1 + r) exp(-r) from -r log2(e) and exp(-r)."""
    return torch.addcmul(exponential, exponents, exponential, value=-1 / _LOG2_E, out=out)


@dataclass(frozen=True)
class RadialFunction(ABC):
    """A function f of `u = scale(alpha) * q`; only the rational quadratic has an `alpha`."""

    name: str

    #: Larger u count as this one: denormal numbers are slow.
    largest: ClassVar[float] = math.inf

    #: Whether f is not differentiable at q = 0: it is sensitive to rounding.
    has_kink: ClassVar[bool] = False

    #: 1 - f is near r^2 / bend, or larger, for small r = u^1/2.
    bend: ClassVar[float] = 2.0

    #: Factor of df/dq that tiles omit.
    derivative_factor: ClassVar[float] = 1.0

    keops: ClassVar[KeOpsFormulas | None] = None

    #: u over q, times any alpha.
    factor: ClassVar[float] = 1.0

    def scale(self, alpha: Tensor | None) -> float | Tensor:
        """[] or [*b, 1, 1]."""
        return self.factor if alpha is None else self.factor / alpha.unsqueeze(-1)

    def clamp_(self, u: Tensor) -> Tensor:
        return u.clamp_(0, self.largest)

    def at_exact_distances(self) -> "RadialFunction":
        """The function for q without rounding errors."""
        return self

    @abstractmethod
    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        """f, differentiable; an unbounded derivative at u = 0 counts as 0."""

    @abstractmethod
    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        """Overwrites u with f, and scratch; returns u."""

    @abstractmethod
    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `value_`, with df/dq (not df/du) over `derivative_factor` in scratch."""

    @abstractmethod
    def less_one_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `value_and_derivative_` for f - 1, with the digits that f loses near one."""

    def alpha_derivative(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        """df/dalpha at fixed q; overwrites u."""
        raise NotImplementedError


def _safe_sqrt(u: Tensor) -> Tensor:
    return u.clamp_min(torch.finfo(u.dtype).tiny).sqrt()


@dataclass(frozen=True)
class _Gaussian(RadialFunction):
    """exp(-q/2)."""

    factor = 0.5
    largest = FARTHEST
    derivative_factor = -0.5
    keops = KeOpsFormulas("Exp(-{u})", "RatCst(-1,2) * Exp(-{u})")

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(u)

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(self.clamp_(u), out=u)

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        self.value_(u, scratch, alpha)
        return u, scratch.copy_(u)

    def less_one_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        _decay(self.clamp_(u), out=scratch)
        return u.neg_().expm1_(), scratch


@dataclass(frozen=True)
class _Matern(RadialFunction):
    """A function of r = sqrt(u)."""

    largest = FARTHEST**2

    def _exponents_(self, u: Tensor, scratch: Tensor) -> Tensor:
        """-r log2(e), with 1 / r in scratch: rsqrt is faster than sqrt on a CPU, and needs positive u."""
        torch.rsqrt(u.clamp_(torch.finfo(u.dtype).tiny, self.largest), out=scratch)
        return torch.addcmul(u.new_zeros(()), u, scratch, value=-_LOG2_E, out=u)


@dataclass(frozen=True)
class _Matern12(_Matern):
    """exp(-r).

    Args:
        noise: u of at most so many rounding errors has derivative 0, not a large random one.
    """

    noise: float = 64.0

    has_kink = True
    derivative_factor = -0.5
    keops = KeOpsFormulas("Exp(-Sqrt({u}))", "RatCst(-1,2) * Exp(-Sqrt({u})) * Rsqrt({u})")  # Rsqrt(0) is 0

    def at_exact_distances(self) -> RadialFunction:
        return replace(self, noise=0.0)

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(_safe_sqrt(u))

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        return self._exponents_(u, scratch).exp2_()

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        noise = self._is_noise(u)
        self.value_(u, scratch, alpha)
        return u, scratch.mul_(u).masked_fill_(noise, 0.0)

    def less_one_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        noise = self._is_noise(u)
        torch.rsqrt(u.clamp_(torch.finfo(u.dtype).tiny, self.largest), out=scratch)
        scratch.mul_(_decay(u.mul_(scratch))).masked_fill_(noise, 0.0)
        return u.neg_().expm1_(), scratch

    def _is_noise(self, u: Tensor) -> Tensor:
        limits = torch.finfo(u.dtype)
        return u <= max(self.noise * limits.eps, limits.tiny)


@dataclass(frozen=True)
class _Matern32(_Matern):
    """(1 + r) exp(-r), r = sqrt(3 q)."""

    factor = 3.0
    derivative_factor = -1.5
    keops = KeOpsFormulas("(IntCst(1) + Sqrt({u})) * Exp(-Sqrt({u}))", "RatCst(-3,2) * Exp(-Sqrt({u}))")

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        r = _safe_sqrt(u)
        return (1 + r) * _decay(r)

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        exponents = self._exponents_(u, scratch)
        return _one_plus_r(exponents, torch.exp2(exponents, out=scratch), out=u)

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        self.value_(u, scratch, alpha)
        return u, scratch

    def less_one_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        # With E = exp(r) - 1, (1 + r) exp(-r) - 1 = (r - E) / (1 + E) keeps the digits of a small r.
        torch.expm1(u.clamp_(0, self.largest).sqrt_(), out=scratch)
        u.sub_(scratch)
        decay = scratch.add_(1).reciprocal_()
        return u.mul_(decay), decay


@dataclass(frozen=True)
class _Matern52(_Matern):
    """(1 + r + r^2/3) exp(-r), r = sqrt(5 q)."""

    factor = 5.0
    bend = 6.0
    derivative_factor = -5 / 6
    keops = KeOpsFormulas(
        "(IntCst(1) + Sqrt({u}) + Inv(IntCst(3)) * {u}) * Exp(-Sqrt({u}))",
        "Inv(IntCst(-6)) * IntCst(5) * (IntCst(1) + Sqrt({u})) * Exp(-Sqrt({u}))",
    )

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        r = _safe_sqrt(u)
        return (1 + r + u / 3) * _decay(r)

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        exponents = self._exponents_(u, scratch)
        return self._from_exponents_(exponents, torch.exp2(exponents, out=scratch))

    def _from_exponents_(self, exponents: Tensor, exponential: Tensor) -> Tensor:
        torch.addcmul(exponents, exponents, exponents, value=-1 / (3 * _LOG2_E), out=exponents)
        return _one_plus_r(exponents, exponential, out=exponents)

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        exponential = torch.exp2(self._exponents_(u, scratch))
        _one_plus_r(u, exponential, out=scratch)
        return self._from_exponents_(u, exponential), scratch

    def less_one_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        growth = torch.expm1(u.clamp_(0, self.largest).sqrt_())
        torch.add(u, 1, out=scratch)
        u.addcmul_(u, u, value=1 / 3).sub_(growth)
        decay = growth.add_(1).reciprocal_()
        return u.mul_(decay), scratch.mul_(decay)


def _rational_quadratic_formulas() -> KeOpsFormulas:
    # KeOps has no log1p. For small u, log(1 + u) loses digits: 2 artanh z with z = u / (2 + u) does not.
    z, rest = "{u} * Inv(IntCst(2) + {u})", "Inv(IntCst(11))"
    for odd in (9, 7, 5, 3):  # 1/3 + z^2/5 + z^4/7 + ...
        rest = f"(Inv(IntCst({odd})) + Square({z}) * {rest})"
    unless_small = "IfElse({{u}} - RatCst(1,10), {}, {})".format
    logarithm = unless_small("Log(IntCst(1) + {u})", f"IntCst(2) * {z} * (IntCst(1) + Square({z}) * {rest})")
    difference = unless_small(
        "{u} * Inv(IntCst(1) + {u}) - Log(IntCst(1) + {u})",
        f"IntCst(-2) * Square({z}) * (Inv(IntCst(1) + {z}) + {z} * {rest})",
    )
    value = f"Exp(-alpha * {logarithm})"
    return KeOpsFormulas(value, f"RatCst(-1,2) * {value} * Inv(IntCst(1) + {{u}})", f"{value} * {difference}")


@dataclass(frozen=True)
class _RationalQuadratic(RadialFunction):
    """(1 + q / (2 alpha))^-alpha."""

    factor = 0.5
    derivative_factor = -0.5
    keops = _rational_quadratic_formulas()

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(alpha.unsqueeze(-1) * torch.log1p(u))

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(self.clamp_(u).log1p_().mul_(alpha.unsqueeze(-1)), out=u)

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        torch.add(self.clamp_(u), 1, out=scratch)
        _decay(u.log1p_().mul_(alpha.unsqueeze(-1)), out=u)
        return u, scratch.reciprocal_().mul_(u)

    def less_one_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        torch.add(self.clamp_(u), 1, out=scratch).reciprocal_()
        scratch.mul_(_decay(u.log1p_().mul_(alpha.unsqueeze(-1))))
        return u.neg_().expm1_(), scratch

    def alpha_derivative(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        self.clamp_(u)
        # The difference cancels for small u; four terms of its series do not.
        small = u < torch.finfo(u.dtype).eps ** 0.2
        series = u.mul(0.8).sub_(0.75).mul_(u).add_(2 / 3).mul_(u).sub_(0.5).mul_(u).mul_(u)
        return self.value(u, alpha) * torch.where(small, series, u / (1 + u) - torch.log1p(u))


RBF = _Gaussian("RBF")
MATERN12 = _Matern12("Matern-1/2")
MATERN32 = _Matern32("Matern-3/2")
MATERN52 = _Matern52("Matern-5/2")
RATIONAL_QUADRATIC = _RationalQuadratic("rational quadratic")

MATERN = {0.5: MATERN12, 1.5: MATERN32, 2.5: MATERN52}

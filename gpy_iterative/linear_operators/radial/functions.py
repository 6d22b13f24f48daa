"""The radial kernels as functions of a squared distance: k(x, x') = outputscale * f(q), q = |x - x'|^2.

Beside its GEMMs, most of a kernel product's cost is the element-wise work on tiles. So each function works in place, in few
passes, on squared distances that are multiplied by its own constant `scale` already.
`alpha` is the rational quadratic's shape parameter and None for all others.

Beside each function stand the same formulas in the language of KeOps, which compiles them to one loop.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor


def _shape(alpha: Tensor | None) -> Tensor:
    if alpha is None:
        raise ValueError("The rational quadratic function needs its alpha.")
    return alpha.unsqueeze(-1)


@dataclass(frozen=True)
class KeOpsFormulas:
    """A radial function in KeOps' language (https://www.kernel-operations.io/keops/api/math-operations.html).

    KeOps computes its fractions in float32 whatever the inputs' dtype: they serve halves, which are exact, and any
    other denominator is taken out of the formulas.

    Attributes:
        value: f, of `{u}` and the variable `alpha`.
        derivative: df/dq (not df/du); 0 at u = 0 where the true one is unbounded.
        alpha_derivative: df/dalpha at fixed q; None where there is no alpha.
        multiple: the formulas are of so many times the function.
    """

    value: str
    derivative: str
    alpha_derivative: str | None = None
    multiple: int = 1


#: The largest r of which exp(-r) is taken, 2e-22.
FARTHEST = 50.0
_LOG2_E = math.log2(math.e)


def _decay(r: Tensor, out: Tensor | None = None) -> Tensor:
    """exp(-r), differentiable without `out`, which may be r itself.

    By exp2, which torch computes faster than exp on a CPU, within the same rounding.
    """
    return torch.mul(r, -_LOG2_E, out=out).exp2_()


def _exponents_(u: Tensor, scratch: Tensor) -> Tensor:
    """-r log2(e) for r = sqrt(u), whose exp2 is exp(-r), in place; scratch becomes 1 / r.

    By rsqrt, which torch computes faster than sqrt on a CPU, within the same rounding.
    """
    torch.rsqrt(u, out=scratch)
    return torch.addcmul(u.new_zeros(()), u, scratch, value=-_LOG2_E, out=u)


def _one_plus_r(exponents: Tensor, exponential: Tensor, out: Tensor) -> Tensor:
    """(1 + r) exp(-r), from -r log2(e) and exp(-r) in one pass; `out` may be either of them."""
    return torch.addcmul(exponential, exponents, exponential, value=-1 / _LOG2_E, out=out)


@dataclass(frozen=True)
class RadialFunction(ABC):
    """One radial function; `u = scale * q` is its argument everywhere, in the range that `clamp_` gives."""

    name: str

    #: Beyond it f counts as constant: so far below rounding that nothing is lost, and so far above the smallest numbers
    #: that the tiles, and what they are multiplied by, stay clear of denormal numbers, which are many times slower.
    largest: ClassVar[float] = math.inf

    #: Whether it is not differentiable at 0, so that it follows every rounding error of the smallest distances.
    has_kink: ClassVar[bool] = False

    #: A constant factor of df/dq, which is left out of its tiles.
    derivative_factor: ClassVar[float] = 1.0

    #: None for a function that only tiles can evaluate.
    keops: ClassVar[KeOpsFormulas | None] = None

    def scale(self, alpha: Tensor | None) -> float | Tensor:
        """The constant that is folded into the squared distances: [] or [*b, 1, 1]."""
        return 1.0

    def clamp_(self, u: Tensor) -> Tensor:
        """Distances, as rounding left them, into the range that the formulas take, in place."""
        return u.clamp_(0, self.largest)

    def at_exact_distances(self) -> "RadialFunction":
        """The function of distances that have no rounding errors of their own, however small they are."""
        return self

    @abstractmethod
    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        """f, out of place and differentiable; its derivative at u = 0 is 0 where the true one is unbounded."""

    @abstractmethod
    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        """The value at distances as rounding left them, overwriting u and a scratch tensor of the same shape. Returns u."""

    @abstractmethod
    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `value_`, and df/dq (not df/du) over `derivative_factor`, overwriting u and scratch."""

    def alpha_derivative(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        """df/dalpha at fixed q, of distances as rounding left them; only the rational quadratic has one."""
        raise ValueError(f"The {self.name} function has no alpha.")


def _safe_sqrt(u: Tensor) -> Tensor:
    return u.clamp_min(torch.finfo(u.dtype).tiny).sqrt()


@dataclass(frozen=True)
class _Gaussian(RadialFunction):
    """exp(-q/2)."""

    largest = FARTHEST
    derivative_factor = -0.5
    keops = KeOpsFormulas("Exp(-{u})", "RatCst(-1,2) * Exp(-{u})")

    def scale(self, alpha: Tensor | None) -> float:
        return 0.5

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(u)

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(self.clamp_(u), out=u)

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        self.value_(u, scratch, alpha)
        return u, scratch.copy_(u)


@dataclass(frozen=True)
class _Matern(RadialFunction):
    """A function of r = sqrt(u), of which its inverse is taken, too: u has to be positive."""

    largest = FARTHEST**2

    def clamp_(self, u: Tensor) -> Tensor:
        return u.clamp_(torch.finfo(u.dtype).tiny, self.largest)


@dataclass(frozen=True)
class _Matern12(_Matern):
    """exp(-r); not differentiable at 0, where its derivative counts as 0.

    Args:
        noise: squared distances up to so many rounding errors count as 0 in the derivative, which would be large and of
            random size there.
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
        return _exponents_(self.clamp_(u), scratch).exp2_()

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        limits = torch.finfo(u.dtype)
        noise = u <= max(self.noise * limits.eps, limits.tiny)
        self.value_(u, scratch, alpha)
        return u, scratch.mul_(u).masked_fill_(noise, 0.0)


@dataclass(frozen=True)
class _Matern32(_Matern):
    """(1 + r) exp(-r), r = sqrt(3 q)."""

    derivative_factor = -1.5
    keops = KeOpsFormulas("(IntCst(1) + Sqrt({u})) * Exp(-Sqrt({u}))", "RatCst(-3,2) * Exp(-Sqrt({u}))")

    def scale(self, alpha: Tensor | None) -> float:
        return 3.0

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        r = _safe_sqrt(u)
        return (1 + r) * _decay(r)

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        exponents = _exponents_(self.clamp_(u), scratch)
        return _one_plus_r(exponents, torch.exp2(exponents, out=scratch), out=u)

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        self.value_(u, scratch, alpha)
        return u, scratch


@dataclass(frozen=True)
class _Matern52(_Matern):
    """(1 + r + r^2/3) exp(-r), r = sqrt(5 q)."""

    derivative_factor = -5 / 6
    keops = KeOpsFormulas(
        "(IntCst(3) + IntCst(3) * Sqrt({u}) + {u}) * Exp(-Sqrt({u}))",
        "RatCst(-5,2) * (IntCst(1) + Sqrt({u})) * Exp(-Sqrt({u}))",
        multiple=3,
    )

    def scale(self, alpha: Tensor | None) -> float:
        return 5.0

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        r = _safe_sqrt(u)
        return (1 + r + u / 3) * _decay(r)

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        exponents = _exponents_(self.clamp_(u), scratch)
        return self._from_exponents_(exponents, torch.exp2(exponents, out=scratch))

    def _from_exponents_(self, exponents: Tensor, exponential: Tensor) -> Tensor:
        """f, overwriting the exponents: (1 + r + r^2/3) times exp(-r)."""
        torch.addcmul(exponents, exponents, exponents, value=-1 / (3 * _LOG2_E), out=exponents)
        return _one_plus_r(exponents, exponential, out=exponents)

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        exponential = torch.exp2(_exponents_(self.clamp_(u), scratch))
        _one_plus_r(u, exponential, out=scratch)
        return self._from_exponents_(u, exponential), scratch


@dataclass(frozen=True)
class _RationalQuadratic(RadialFunction):
    """(1 + q / (2 alpha))^-alpha."""

    derivative_factor = -0.5
    keops = KeOpsFormulas(
        "Exp(-alpha * Log(IntCst(1) + {u}))",
        "RatCst(-1,2) * Exp(-alpha * Log(IntCst(1) + {u})) * Inv(IntCst(1) + {u})",
        "Exp(-alpha * Log(IntCst(1) + {u})) * ({u} * Inv(IntCst(1) + {u}) - Log(IntCst(1) + {u}))",
    )

    def scale(self, alpha: Tensor | None) -> Tensor:
        return 0.5 / _shape(alpha)

    def value(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(_shape(alpha) * torch.log1p(u))

    def value_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> Tensor:
        return _decay(self.clamp_(u).log1p_().mul_(_shape(alpha)), out=u)

    def value_and_derivative_(self, u: Tensor, scratch: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
        torch.add(self.clamp_(u), 1, out=scratch)
        _decay(u.log1p_().mul_(_shape(alpha)), out=u)
        return u, scratch.reciprocal_().mul_(u)

    def alpha_derivative(self, u: Tensor, alpha: Tensor | None) -> Tensor:
        return self.value(self.clamp_(u), alpha) * (u / (1 + u) - torch.log1p(u))


RBF = _Gaussian("RBF")
MATERN12 = _Matern12("Matern-1/2")
MATERN32 = _Matern32("Matern-3/2")
MATERN52 = _Matern52("Matern-5/2")
RATIONAL_QUADRATIC = _RationalQuadratic("rational quadratic")

#: By GPyTorch's `nu`.
MATERN = {0.5: MATERN12, 1.5: MATERN32, 2.5: MATERN52}

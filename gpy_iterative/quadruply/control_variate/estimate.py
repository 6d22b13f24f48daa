"""A control variate for the data term of sampled features: the same quadratic forms at points of which all is known.

At support points p, drawn once, the sampled groups' part of the latent mean a = Phi_p mu is known. The residual form

    sum_p [ (r - a)^2 - (r - v_i)(r - v_j) ] / noise,    v_i = weight Phi_{p,i} mu_i,

has expectation zero over the index sets i, j, in value and in gradient, and is what the data term's noise looks like
(Evans and Nair 2018, equation 3, has a^2 - v_i v_j; the residual form also answers for the cross term with the targets).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpy_iterative.quadruply.control_variate.known_latent import KnownLatent, check_entries
from gpy_iterative.quadruply.feature_samples import Head, Sample
from gpy_iterative.quadruply.model import QuadruplyStochasticGP


@dataclass
class ControlVariate:
    """The support points of one run.

    Attributes:
        latent: at the points, p of them.
        y: their targets [p].
        noise: their fixed noise variances [p]; None where all have the likelihood's.
    """

    latent: KnownLatent
    y: Tensor
    noise: Tensor | None

    @classmethod
    def start(cls, model: QuadruplyStochasticGP, x: Tensor, y: Tensor, noise: Tensor | None) -> "ControlVariate":
        """At support points x [p, d] with targets y [p] and fixed noise [p] (or None); cost p m (1 + k)."""
        return cls(KnownLatent.start(model, x), y, noise)

    def restart(self, model: QuadruplyStochasticGP) -> None:
        """Works all out anew, at the model's current weights, hyperparameters and dtype."""
        like = model.basis.like
        self.latent, self.y = self.latent.moved_to(model, self.latent.x.to(like)), self.y.to(like)
        self.noise = None if self.noise is None else self.noise.to(like)

    def term(
        self,
        model: QuadruplyStochasticGP,
        first: Sample,
        second: Sample,
        residual: Tensor,
        noise: Tensor,
        *,
        form: str,
    ) -> Tensor:
        """What is added to the data term, divided by the number of points: expectation zero, [].

        Args:
            model: with the parameters of this step.
            first, second: its samples.
            residual: targets minus prior mean at the points, [p], detached.
            noise: variances at the points, [p], detached: the gradient with respect to the noise would be biased by the
                factor (all groups) / |U|.
            form: "residual", or "printed" for a^2 - v_i v_j.
        """
        left, right, total = self.latent.at(model, first, second)
        head = Head.of(model, self.latent.head)
        target = (residual - head.mean) if form == "residual" else -head.mean
        mean = (target - total[:, 0]).square() - (target - first.mean(left)) * (target - second.mean(right))
        root = (head.root + total[:, 1:]).square() - (head.root + first.root(left)) * (head.root + second.root(right))
        return ((mean + root.sum(-1)).double() / noise.double()).sum() / len(residual)

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors, by name."""
        noise = {} if self.noise is None else {"noise": self.noise.clone()}
        return self.latent.to_dict() | {"y": self.y.clone()} | noise

    @classmethod
    def from_dict(cls, model: QuadruplyStochasticGP, state: dict[str, Tensor]) -> "ControlVariate":
        """The inverse of `to_dict`. Raises ValueError for entries that are missing or of another shape."""
        check_entries(state, {"y"})
        latent = KnownLatent.from_dict(model, state)
        if state["y"].shape != latent.x.shape[:1]:
            raise ValueError(
                f"This is no training state: {len(latent.x)} support points have targets of shape "
                f"{tuple(state['y'].shape)}."
            )
        like = model.basis.like
        y, noise = (state[name].clone().to(like) if name in state else None for name in ("y", "noise"))
        return cls(latent, y, noise)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves or converts all tensors."""
        self.latent.apply(function)
        self.y, self.noise = function(self.y), None if self.noise is None else function(self.noise)

"""All points of one run whose latent function is known: rows that are kept, and a control variate's support points."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.quadruply.control_variate.estimate import ControlVariate
from gpy_iterative.quadruply.control_variate.kept_rows import KeptRows
from gpy_iterative.quadruply.control_variate.known_latent import KnownLatent
from gpy_iterative.quadruply.model import QuadruplyStochasticGP


@dataclass
class KnownPoints:
    """None stands for what there is not, or not yet."""

    kept: KeptRows | None = None
    control: ControlVariate | None = None

    def latents(self) -> list[KnownLatent]:
        """Of what there is."""
        return [part.latent for part in (self.kept, self.control) if part is not None]

    def follow(self, model: QuadruplyStochasticGP, refresh_every: int | None = None) -> None:
        """Brings all to the model's weights; see `KnownLatent.catch_up`."""
        with torch.inference_mode(False), torch.no_grad():
            for part in (self.kept, self.control):
                if part is not None and part.latent.follows(model):
                    part.latent.catch_up(model, refresh_every)
                elif part is not None:
                    part.restart(model)

    def refresh(self, model: QuadruplyStochasticGP) -> None:
        """Works all out from all features: m (1 + k) a point."""
        with torch.inference_mode(False):
            for latent in self.latents():
                latent.refresh(model)

    def set_revision(self, revision: int) -> None:
        """Which weights they belong to; -1 to have them worked out anew before they are used again."""
        for latent in self.latents():
            latent.revision = revision

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors, by name; call `follow` before."""
        kept = {} if self.kept is None else {f"kept.{name}": part for name, part in self.kept.to_dict().items()}
        if self.control is None:
            return kept
        return kept | {f"control.{name}": part for name, part in self.control.to_dict().items()}

    @classmethod
    def from_dict(cls, model: QuadruplyStochasticGP, state: dict[str, Tensor]) -> "KnownPoints":
        """The inverse of `to_dict`. Raises ValueError for entries that are missing or of another shape."""
        kept, control = (
            {name.removeprefix(prefix): part for name, part in state.items() if name.startswith(prefix)}
            for prefix in ("kept.", "control.")
        )
        return cls(
            KeptRows.from_dict(model, kept) if kept else None,
            ControlVariate.from_dict(model, control) if control else None,
        )

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves or converts all tensors."""
        for part in (self.kept, self.control):
            if part is not None:
                part.apply(function)

"""Sampled data that are kept for several steps, so that what all features predict for them is known.

A sample of features tells little of a residual: its noise, (m / sampled - 1) times the sum of (feature times weight)^2,
may be far above the targets' own. Where rows are kept, their latent function is worked out once, from all features, and
then follows the steps: residuals are exact, and so is what Jensen's inequality would lose on other likelihoods.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.quadruply.control_variate.known_latent import KnownLatent, check_entries
from gpy_iterative.quadruply.model import QuadruplyStochasticGP


@dataclass
class KeptRows:
    """The rows of one draw.

    Attributes:
        latent: at the rows, b of them.
        index: where they are in the data, [b].
        steps: evaluations that were made with them.
    """

    latent: KnownLatent
    index: Tensor
    steps: int = 0

    @classmethod
    def draw(
        cls, model: QuadruplyStochasticGP, x: Tensor, index: Tensor, before: "KeptRows | None" = None
    ) -> "KeptRows":
        """Rows `index` [b] of the data x [n, d]; cost b m (1 + k). `before` has those that they take the place of."""
        points = x[index].detach()
        return cls(KnownLatent.start(model, points) if before is None else before.latent.moved_to(model, points), index)

    def are_in(self, x: Tensor) -> bool:
        """Whether these data have the rows where they had them."""
        return len(x) > int(self.index.max()) and torch.equal(x[self.index], self.latent.x.to(x))

    def are_due(self, x: Tensor, num_steps: int) -> bool:
        """Whether other rows are to take their place; there are none where these are all."""
        return self.steps >= num_steps and len(self.index) < len(x)

    def restart(self, model: QuadruplyStochasticGP) -> None:
        """Works all out anew, at the model's current weights and dtype."""
        like = model.basis.like
        self.latent, self.index = self.latent.moved_to(model, self.latent.x.to(like)), self.index.to(like.device)

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors, by name."""
        return self.latent.to_dict() | {"index": self.index.clone(), "kept": torch.tensor(self.steps)}

    @classmethod
    def from_dict(cls, model: QuadruplyStochasticGP, state: dict[str, Tensor]) -> "KeptRows":
        """The inverse of `to_dict`. Raises ValueError for entries that are missing or of another shape."""
        check_entries(state, {"index", "kept"})
        latent, index = KnownLatent.from_dict(model, state), state["index"]
        is_index = index.dtype == torch.int64 and len(index) > 0 and bool((index >= 0).all())
        if not is_index or index.shape != latent.x.shape[:1] or int(state["kept"]) < 0:
            raise ValueError(
                f"This is no training state: {len(latent.x)} rows that are kept have an index of shape "
                f"{tuple(index.shape)} and {index.dtype}, after {int(state['kept'])} steps."
            )
        return cls(latent, index.clone().to(latent.x.device), int(state["kept"]))

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves or converts all tensors."""
        self.latent.apply(function)
        self.index = function(self.index)

"""Which rows a step sees."""

import torch
from torch import Tensor


class RowSampler:
    """Batches of rows in random order: every row at most once between two shuffles.

    Each batch by itself is a uniform draw without replacement. What is left at the end of a shuffled order and too short
    for a batch is skipped, so that all batches have one size; it is another part every time.

    Args:
        generator: of the shuffles.

    Cost: n once in n / batch_size calls, and the size of the batch in all others.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._order = torch.empty(0, dtype=torch.int64)
        self._position = 0

    def draw(self, num_data: int, batch_size: int) -> Tensor:
        """The next batch: row numbers [batch_size] on the generator's device."""
        if len(self._order) != num_data or self._position + batch_size > num_data:
            self._order = torch.randperm(num_data, generator=self._generator, device=self._generator.device)
            self._position = 0
        rows = self._order[self._position : self._position + batch_size]
        self._position += batch_size
        return rows

    def to_dict(self) -> dict[str, Tensor]:
        """Order and position, as tensors that later draws do not change."""
        return {"order": self._order.clone(), "position": torch.tensor(self._position)}

    def load_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of `to_dict`."""
        self._order = state["order"].to(self._generator.device, copy=True)
        self._position = int(state["position"])

    def memento(self) -> tuple[Tensor, int]:
        """What `restore` takes, without a copy: orders are replaced, never written to."""
        return self._order, self._position

    def restore(self, memento: tuple[Tensor, int]) -> None:
        """Goes back to where `memento` was called."""
        self._order, self._position = memento

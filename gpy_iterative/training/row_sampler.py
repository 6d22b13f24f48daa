"""Batches of rows in random order, whose state is a part of a run."""

import torch
from torch import Tensor

from gpy_iterative.training.run import Run

#: The part of a run that has drawn no rows.
NO_ROWS = {"order": torch.empty(0, dtype=torch.int64), "position": torch.tensor(0)}


def next_rows(run: Run, name: str, num_data: int, batch_size: int) -> tuple[Tensor, Run]:
    """The next batch, row numbers [batch_size] on the generator's device, and the run after it.

    Every row comes at most once between two shuffles, and each batch by itself is a uniform draw without replacement. What
    is left at the end of a shuffled order and too short for a batch is skipped, so that all batches have one size.

    Args:
        run: whose part `name` has the shuffled order and the position in it.
        name: of the part.
        num_data: n.
        batch_size: at most n.

    Cost: n once in n / batch_size calls, and the size of the batch in all others.
    """
    order, position = run.parts[name]["order"], int(run.parts[name]["position"])
    if len(order) != num_data or position + batch_size > num_data:
        generator = run.generator()
        order, position = torch.randperm(num_data, generator=generator, device=generator.device), 0
        run = run.drawn(generator)
    end = position + batch_size
    return order[position:end], run.having(**{name: {"order": order, "position": torch.tensor(end)}})

"""Random batches of rows, with state in a run."""

import torch
from torch import Tensor

from gpy_iterative.training.run import Run

#: A part without drawn rows.
NO_ROWS = {"order": torch.empty(0, dtype=torch.int64), "position": torch.tensor(0)}


def next_rows(run: Run, name: str, num_data: int, batch_size: int) -> tuple[Tensor, Run]:
    """The next batch, row numbers [batch_size] on the generator's device, and the next run.

    Each batch is a uniform draw without replacement; no row repeats before the next shuffle. Shorter remainders are
    skipped.

    Args:
        run: its part `name` has shuffled order and position.
        name: of the part.
        num_data: n.
        batch_size: at most n.

    Cost: n once per n / batch_size calls, else batch_size.
    """
    order, position = run.parts[name]["order"], int(run.parts[name]["position"])
    if len(order) != num_data or position + batch_size > num_data:
        generator = run.generator()
        order, position = torch.randperm(num_data, generator=generator, device=generator.device), 0
        run = run.drawn(generator)
    end = position + batch_size
    return order[position:end], run.having(**{name: {"order": order, "position": torch.tensor(end)}})

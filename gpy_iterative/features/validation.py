"""Checks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import gpytorch
import torch
from torch import Tensor

from gpy_iterative.changes import SeenVersions
from gpy_iterative.errors import BiasWarning, warn

FEW_ROWS, MANY_ROWS = 2, 16
#: Largest relative difference from rounding, even in half precision.
SAME_ROWS = 0.01
STEPS_ALONE = 10


@torch.inference_mode(False)
@torch.no_grad()
def check_rows(model: gpytorch.models.ExactGP, moments: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    """Raises ValueError if `moments`, mean [k] and covariance [k, k] of the first k data, depend on the batch or chance."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    found = []
    with torch.random.fork_rng(list(devices)):
        for count in (FEW_ROWS, MANY_ROWS, MANY_ROWS):
            try:
                found.append(moments(count))
            finally:
                for buffer, values in before:  # such as running statistics
                    if not torch.equal(buffer, values):
                        buffer.copy_(values)
    for few, many in pairwise(found):
        size = len(few[0])
        for ours, theirs in zip(few, (many[0][:size], many[1][:size, :size]), strict=True):
            if (ours - theirs).abs().max() > SAME_ROWS * ours.abs().max():
                raise ValueError(
                    f"The model gives the first {size} data another mean or covariance beside other rows, or when they are "
                    "evaluated again: a layer depends on the batch, or on chance, which no marginal likelihood allows. "
                    "Put such layers into evaluation mode after every model.train(), or take LayerNorm; a "
                    "GridInterpolationKernel needs grid_bounds= that hold all inputs."
                )


def checked_indices(indices: Tensor, num_data: int) -> Tensor:
    """Rows, int64 [b]."""
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int64, torch.int32) or indices.dim() != 1:
        what = f"{tuple(indices.shape)}, {indices.dtype}" if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"indices must be a tensor of whole row numbers [b], got {what}.")
    if not len(indices):
        raise ValueError("indices must name at least one row.")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= num_data:
        raise ValueError(f"indices must lie between 0 and {num_data - 1}; the smallest is {low}, the largest {high}.")
    return indices.long()


class StandstillWatch:
    """Warns if only hyperparameters move."""

    def __init__(self, method: str) -> None:
        self._method, self._steps = method, 0
        self._own, self._hyperparameters = SeenVersions(), SeenVersions()

    def see(self, own: Sequence[Tensor], hyperparameters: Sequence[Tensor], trains: bool) -> None:
        """Call it at every step; `trains`: the step draws a batch."""
        weights = [parameter for parameter in own if parameter.requires_grad]
        stands = not trains or (bool(weights) and self._own.are(weights))
        self._steps = self._steps + 1 if stands and not self._hyperparameters.are(hyperparameters) else 0
        self._own, self._hyperparameters = SeenVersions.of(weights), SeenVersions.of(hyperparameters)
        if self._steps == STEPS_ALONE:
            reason = (
                f"left the parameters of {self._method} itself where they were: make the optimiser with mll.parameters()."
                if trains
                else f"saw one batch, since {self._method} is in evaluation mode: call mll.train()."
            )
            warn(f"The last {STEPS_ALONE} steps moved hyperparameters and {reason}", BiasWarning)

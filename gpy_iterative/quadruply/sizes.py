"""Sizes of a step, and checks of its data."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpy_iterative.changes import SeenVersions
from gpy_iterative.checks import check_count, check_finite, check_same_kind
from gpy_iterative.quadruply.model import QuadruplyStochasticGP
from gpy_iterative.training.run import Part
from gpy_iterative.worker_threads import CPU

#: Defaults, if there are as many.
DATA_SAMPLES, FEATURE_SAMPLES, CONTROL_POINTS = 500, 10_000, 500
#: Mean samples of each feature between draws of rows, which evaluate all features.
SWEEPS_PER_BATCH = 4


class TrainingData:
    def __init__(self, num_data: int | None, num_samples: int | None) -> None:
        for name, value in (("num_data", num_data), ("num_data_samples", num_samples)):
            check_count(name, value, optional=True)
        if num_data is not None and num_samples is not None and num_samples > num_data:
            raise ValueError(f"num_data_samples must be at most num_data = {num_data}, got {num_samples}.")
        self.num_data, self.num_samples = num_data, num_samples
        self._checked = SeenVersions()

    def num_data_of(self, size: int) -> int:
        return size if self.num_data is None else self.num_data

    def num_samples_of(self, size: int) -> int:
        return min(self.num_samples or DATA_SAMPLES, size)

    def check(self, x: Tensor, target: Tensor, check_target: Callable[[Tensor], None], known: Part | None) -> None:
        """Raises ValueError if the data do not fit one another, the likelihood or `known`, the first step's `marks`."""
        size = len(x)
        if not isinstance(target, Tensor) or target.shape != x.shape[:1]:
            shape = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(
                f"The target must be a tensor of shape ({size},), one value for each row of the inputs; got {shape}."
            )
        check_same_kind("x", x, "the target", target if target.is_floating_point() else target[:0].to(x.dtype))
        if size == 0:
            raise ValueError("There are no data: x has no rows.")
        if not self._checked.are((x, target)):
            check_finite("x", x)
            check_finite("target", target)
            check_target(target)
            self._checked = SeenVersions.of((x, target))
        if self.num_data is not None:
            if size > self.num_data:
                raise ValueError(
                    f"num_data is {self.num_data}, but {size} rows were passed: it must be the number of all training data."
                )
            return
        marks = self.marks(x, target)
        same = (torch.equal(marks[name], tensor.to(marks[name])) for name, tensor in (known or {}).items())
        if known is not None and not all(same):
            raise ValueError(
                f"num_data=None takes the first {int(known['size'])} rows that were passed as all training data, and these "
                f"{size} rows or their targets are others. For batches or other data pass num_data=len(train_x)."
            )
        if self.num_samples is not None and self.num_samples > size:
            raise ValueError(f"num_data_samples must be at most {size}, the number of data; got {self.num_samples}.")

    def marks(self, x: Tensor, target: Tensor) -> Part:
        """Number of rows; first, middle and last row."""
        marked = [0, len(x) // 2, -1]
        return {
            "rows": x.detach()[marked].clone(),
            "targets": target.detach()[marked].clone(),
            "size": torch.tensor(len(x), device=CPU),
        }


def group_samples(model: QuadruplyStochasticGP, given: int | None) -> int:
    size, groups = model.basis.group_size, model.num_tail_groups
    if given is None:
        return min(FEATURE_SAMPLES // size, groups)
    check_count("num_feature_samples", given)
    if given % size:
        raise ValueError(f"num_feature_samples must be a multiple of {size}, the features of a group; got {given}.")
    if given > groups * size:
        raise ValueError(
            f"num_feature_samples must be at most {groups * size}, the number of features beyond the head; got {given}."
        )
    return given // size


def control_points(given: int | None, *, is_gaussian: bool) -> int:
    if given is None:
        return CONTROL_POINTS if is_gaussian else 0
    check_count("num_control_points", given, least=0)
    if given and not is_gaussian:
        raise ValueError(f"Control variates are for Gaussian noise: pass num_control_points=0, got {given}.")
    return given


def steps_per_batch(
    model: QuadruplyStochasticGP, given: int | None, samples: int, *, num_control_points: int | None
) -> int:
    is_sampled = 0 < samples < model.num_tail_groups
    if given is None:
        keeps = is_sampled and not model.basis.num_head_features and num_control_points is None
        return math.ceil(SWEEPS_PER_BATCH * model.num_tail_groups / samples) if keeps else 1
    check_count("num_steps_per_batch", given)
    if given > 1 and num_control_points:
        raise ValueError(
            "Control points are for rows that every step draws again: pass num_control_points=0 or num_steps_per_batch=1."
        )
    return given if is_sampled else 1

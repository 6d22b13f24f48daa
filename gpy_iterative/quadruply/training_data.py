"""What is passed to a step: all training data, or a batch of them."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpy_iterative.changes import version
from gpy_iterative.checks import check_count, check_finite


@dataclass(frozen=True)
class _Seen:
    """A tensor that was looked at, told by the memory that it shows: a vector of inputs is a new column at each call."""

    base: weakref.ref[Tensor]
    version: object
    layout: tuple[object, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Seen":
        base = tensor if tensor._base is None else tensor._base
        layout = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        return cls(weakref.ref(base), version(tensor), layout)

    def is_still(self, tensor: Tensor) -> bool:
        now = self.of(tensor)
        return self.base() is now.base() and (self.version, self.layout) == (now.version, now.layout)


class TrainingData:
    """The number of data, and how many of them a step looks at.

    Args:
        num_data: n; None: every call passes all data.
        num_samples: rows of a step; None is `default`, or all there are.
        default: see there.

    Raises:
        ValueError: counts below 1, more samples than data.
    """

    def __init__(self, num_data: int | None, num_samples: int | None, default: int) -> None:
        for name, value in (("num_data", num_data), ("num_data_samples", num_samples)):
            if value is not None:
                check_count(name, value)
        if num_data is not None and num_samples is not None and num_samples > num_data:
            raise ValueError(f"num_data_samples must be at most num_data = {num_data}, got {num_samples}.")
        self.num_data, self.num_samples, self.default = num_data, num_samples, default
        self._marks: Tensor | None = None  # first, middle and last row of what `num_data=None` calls all data
        self._size: int | None = None
        self._checked: tuple[_Seen, _Seen] | None = None

    def num_data_of(self, size: int) -> int:
        """n, where `size` rows were passed."""
        return size if self.num_data is None else self.num_data

    def num_samples_of(self, size: int) -> int:
        """Rows that a step looks at, where `size` rows were passed."""
        return min(self.num_samples or self.default, size)

    def check(self, x: Tensor, target: Tensor, check_target: Callable[[Tensor], None], *, whole: bool = False) -> None:
        """Raises ValueError for what does not fit.

        Costs nothing that grows with the number of rows, but for tensors that were not seen in the last call, all of which
        is then checked to be finite, and by `check_target` to be what the likelihood knows.
        """
        if not isinstance(target, Tensor) or target.shape != x.shape[:1]:
            shape = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(f"The target must be a tensor of shape ({len(x)},), as the inputs have rows; got {shape}.")
        for what in ("dtype", "device"):
            ours, theirs = getattr(x, what), getattr(target, what)
            if ours != theirs and not (what == "dtype" and not target.is_floating_point()):
                raise ValueError(f"The inputs have {what} {ours}, the target {theirs}.")
        size = len(x)
        if size == 0:
            raise ValueError("There are no data: x has no rows.")
        if not self._is_checked(x, target):
            check_finite("x", x)
            check_finite("target", target)
            check_target(target)
            self._checked = (_Seen.of(x), _Seen.of(target))
        if self.num_data is None:
            self._check_same(x)
            if self.num_samples is not None and self.num_samples > size:
                raise ValueError(
                    f"num_data_samples must be at most {size}, the data there are; got {self.num_samples}."
                )
        elif size > self.num_data or (whole and size != self.num_data):
            raise ValueError(f"num_data is {self.num_data}, but {size} rows were passed.")

    def accept(self, x: Tensor) -> None:
        """Remembers what a successful step was given."""
        if self.num_data is None and self._marks is None:
            self._size, self._marks = len(x), _marks(x)

    def to_dict(self) -> dict[str, Tensor]:
        """What calls are compared with, as tensors by name; none before the first step."""
        if self._marks is None or self._size is None:
            return {}
        return {"marks": self._marks.clone(), "size": torch.tensor(self._size)}

    def load_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of `to_dict`. Raises ValueError, and changes nothing, where one entry lacks the other."""
        if state.keys() not in (set(), {"marks", "size"}):
            raise ValueError(f"This is no whole training state: of the data it has only {', '.join(state)}.")
        self._marks, self._size = (state["marks"].clone(), int(state["size"])) if state else (None, None)

    def _check_same(self, x: Tensor) -> None:
        if self._marks is None:
            return
        marks = self._marks.to(x)
        if len(x) != self._size or not torch.equal(_marks(x), marks):
            raise ValueError(
                f"num_data=None takes the first {self._size} rows that were passed for all training data; these {len(x)} "
                "rows are others. For batches, or other data, pass the number of all data: num_data=len(train_x)."
            )

    def _is_checked(self, x: Tensor, target: Tensor) -> bool:
        return self._checked is not None and all(
            seen.is_still(tensor) for seen, tensor in zip(self._checked, (x, target), strict=True)
        )

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_checked": None}  # weak references are neither copied nor pickled


def _marks(x: Tensor) -> Tensor:
    return x.detach()[[0, len(x) // 2, -1]].clone()

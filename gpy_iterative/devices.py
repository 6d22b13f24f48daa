"""Numbers that depend on the kind of device."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class ByDevice(Generic[Number]):
    """One number for CPUs, whose caches work should fit, and one for accelerators, where each launch takes microseconds."""

    cpu: Number
    accelerator: Number

    def on(self, device: torch.device) -> Number:
        return self.cpu if device.type == "cpu" else self.accelerator

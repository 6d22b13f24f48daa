"""What a contender computes on: the CPU or CUDA, a clock that waits for it, and the memory that it has."""

import resource
import time
from enum import StrEnum

import psutil
import torch


class Device(StrEnum):
    """Where data and models are."""

    CPU = "cpu"
    CUDA = "cuda"


def clock(device: str) -> float:
    """Seconds of a clock, read when the device has done all that it was given. Every timing on a device reads this one."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def free_memory(device: str) -> int:
    """Bytes that are free on the device now."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def peak_process_memory() -> float:
    """The most memory that this process has had so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak_memory() -> dict[str, float]:
    """`peak_memory_mb`, and `peak_device_memory_mb`, the most that its tensors held on CUDA, where it ever used that."""
    found = {"peak_memory_mb": peak_process_memory()}
    if torch.cuda.is_initialized():
        found["peak_device_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def described(device: str) -> dict[str, str | None]:
    """What a reader needs to judge a number of this device, beside the processor."""
    if torch.device(device).type != "cuda":
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}

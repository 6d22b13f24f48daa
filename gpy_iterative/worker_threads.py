"""Threads that share the parts of a computation.

Torch divides each operation among threads that wait for each other: another busy process delays every operation. Here a
worker takes the next part, such as some tiles, and runs its operations on one thread.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import torch

Number = TypeVar("Number", int, float)
Item = TypeVar("Item")
Result = TypeVar("Result")

CPU = torch.device("cpu")
#: With one, all wait for the slowest; each part of a sum costs a copy.
PARTS_PER_THREAD = 2

#: OpenMP has a number of threads per thread, other backends one for all.
_HAS_OWN_NUMBERS = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


@dataclass(frozen=True)
class ByDevice(Generic[Number]):
    """A size for CPUs, and one for accelerators."""

    cpu: Number
    accelerator: Number

    def on(self, device: torch.device) -> Number:
        return self.cpu if device.type == "cpu" else self.accelerator


class _Setting(threading.local):
    #: The user's number of threads, while torch runs on one.
    number: int | None = None


class _Pool:
    def __init__(self) -> None:
        # New threads start with the number that any thread set last; the keeper restores it.
        self._keeper = ThreadPoolExecutor(1, "gpy_iterative-setting")
        self._workers: ThreadPoolExecutor | None = None
        self._lock, self._starting = threading.Lock(), threading.Lock()

    @property
    def workers(self) -> ThreadPoolExecutor:
        # All start here, because a thread inherits the number that another has just set.
        with self._starting:
            if self._workers is None:
                number = max(os.cpu_count() or 1, 2)
                workers = ThreadPoolExecutor(number, "gpy_iterative-worker", self.set_own_number, (1,))
                meeting = threading.Barrier(number)
                for met in [workers.submit(meeting.wait) for _ in range(number)]:
                    met.result()
                self._workers = workers
        return self._workers

    def set_own_number(self, number: int) -> int:
        """For the calling thread only; returns the old number."""
        with self._lock:
            before = torch.get_num_threads()
            torch.set_num_threads(number)
            self._keeper.submit(torch.set_num_threads, before).result()
        return before


_setting = _Setting()
_pool = _Pool()


def _forget_pool() -> None:
    global _pool  # threads do not survive a fork
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def num_threads() -> int:
    if _setting.number is not None:
        return _setting.number
    return torch.get_num_threads() if _HAS_OWN_NUMBERS else 1


@contextmanager
def divided() -> Iterator[None]:
    """Inside, torch runs on the calling thread alone; give parallel work to `run`.

    Entering takes about 50 microseconds.
    """
    number = num_threads()
    if number == 1 or _setting.number is not None:
        yield
        return
    _pool.set_own_number(1)
    _setting.number = number
    try:
        yield
    finally:
        _setting.number = None
        torch.set_num_threads(number)


def shares(items: Sequence[Item], device: torch.device = CPU) -> list[Sequence[Item]]:
    """Contiguous shares of similar length; one for a device other than a CPU."""
    number = num_threads()
    count = min(PARTS_PER_THREAD * number, len(items))
    if number == 1 or count <= 1 or device.type != "cpu":
        return [items]
    cuts = [len(items) * part // count for part in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(cuts)]


class _Work(Generic[Result]):
    def __init__(self, tasks: Sequence[Callable[[], Result]]) -> None:
        self._left = iter(enumerate(tasks))
        self._lock = threading.Lock()
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.results: dict[int, Result] = {}

    def take(self) -> None:
        is_grad_enabled, is_inference = self._modes
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad_enabled):
            try:
                while (taken := self._taken()) is not None:
                    number, task = taken
                    self.results[number] = task()
            finally:  # after an error others are skipped
                with self._lock:
                    self._left = iter(())

    def _taken(self) -> tuple[int, Callable[[], Result]] | None:
        with self._lock:
            return next(self._left, None)


def run(tasks: Sequence[Callable[[], Result]], device: torch.device = CPU) -> list[Result]:
    """The tasks' results in order, from the calling thread and, on a CPU, workers.

    Raises a task's exception, after started tasks have ended; others are skipped.
    """
    number = min(num_threads(), len(tasks))
    if number <= 1 or device.type != "cpu":
        return [task() for task in tasks]
    with divided():
        work = _Work(tasks)
        pool = _pool.workers
        workers = [pool.submit(work.take) for _ in range(number - 1)]
        try:
            work.take()
        finally:
            begun = [worker for worker in workers if not worker.cancel()]  # do not wait for others
            wait(begun)
            # The pool's queue keeps a cancelled worker until another one sees it.
            results, work.results = work.results, {}
    for worker in begun:
        worker.result()
    return [results[number] for number in range(len(tasks))]


def summed(
    task: Callable[[Sequence[Item]], list[torch.Tensor]], items: Sequence[Item], device: torch.device
) -> list[torch.Tensor]:
    """Sums over items; `task` returns new tensors for a share."""
    totals, *others = run([partial(task, share) for share in shares(items, device)])
    for other in others:
        for total, part in zip(totals, other, strict=True):
            total += part
    return totals

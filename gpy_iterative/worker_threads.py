"""Threads that share the parts of a computation.

Torch divides every operation among OpenMP's threads, which wait for each other at its end. Where another process holds one
of the processors, each of the thousands of operations of a training step waits for a thread that is not running. So the
work is divided above torch: worker threads take the next part, some tiles for example, and every operation inside runs on
one thread. Nobody waits before the parts run out, and a worker that never gets to run takes none.

The number of threads is torch's own setting, `torch.set_num_threads`.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

CPU = torch.device("cpu")
#: Parts for every thread. With one each, all wait for the slowest; each part of a sum costs a copy of its result.
PARTS_PER_THREAD = 2

#: Torch keeps the number of OpenMP's threads for each thread. Other parallel backends know one number for all.
_HAS_OWN_NUMBERS = "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


class _Setting(threading.local):
    """The number of threads that the user set, while torch's own operations run on one."""

    number: int | None = None


class _Pool:
    """The worker threads of this process, made when they are first needed."""

    def __init__(self) -> None:
        # The number that new threads of the process start with is the one that was set last, by whichever thread. A
        # thread of its own sets it to what it was whenever another thread has changed its own number.
        self._keeper = ThreadPoolExecutor(1, "gpy_iterative-setting")
        self._workers: ThreadPoolExecutor | None = None
        self._lock, self._starting = threading.Lock(), threading.Lock()

    @property
    def workers(self) -> ThreadPoolExecutor:
        """All of them started: a thread that begins while a late one changes its number would take that for its own."""
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
        """Sets how many threads torch's operations take in the calling thread only; returns what it was."""
        with self._lock:
            before = torch.get_num_threads()
            torch.set_num_threads(number)
            self._keeper.submit(torch.set_num_threads, before).result()
        return before


_setting = _Setting()
_pool = _Pool()


def _forget_pool() -> None:
    """Threads do not survive a fork."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def num_threads() -> int:
    """How many threads share a computation that is divided: torch's setting, of the calling thread."""
    if _setting.number is not None:
        return _setting.number
    return torch.get_num_threads() if _HAS_OWN_NUMBERS else 1


@contextmanager
def divided() -> Iterator[None]:
    """Inside, torch's operations run on the calling thread alone; what is to be divided is given to `run`.

    Entering takes some 50 microseconds, nothing inside of another one or where there is one thread. Torch's setting is
    as it was afterwards, and other threads do not see the change.
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
    """Neighbouring items together, in as many shares of nearly the same length as `run` has use for: at least one.

    On a device other than a CPU there is one.
    """
    number = num_threads()
    count = min(PARTS_PER_THREAD * number, len(items))
    if number == 1 or count <= 1 or device.type != "cpu":
        return [items]
    cuts = [len(items) * part // count for part in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(cuts)]


class _Work(Generic[Result]):
    """Tasks that several threads take one by one. The first exception ends it."""

    def __init__(self, tasks: Sequence[Callable[[], Result]]) -> None:
        self._next = iter(enumerate(tasks))
        self._lock = threading.Lock()
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.results: dict[int, Result] = {}
        self.error: BaseException | None = None

    def take(self) -> None:
        """Takes tasks until there are none."""
        is_grad_enabled, is_inference = self._modes
        with torch.inference_mode(is_inference), torch.set_grad_enabled(is_grad_enabled):
            while (taken := self._taken()) is not None:
                number, task = taken
                try:
                    self.results[number] = task()
                except BaseException as error:
                    self.end(error)

    def _taken(self) -> tuple[int, Callable[[], Result]] | None:
        with self._lock:
            return None if self.error is not None else next(self._next, None)

    def end(self, error: BaseException) -> None:
        """No further task is taken."""
        with self._lock:
            self.error = self.error or error

    def outcome(self) -> tuple[dict[int, Result], BaseException | None]:
        """Results and error, handed out: the pool's queue holds this object until a worker gets to see its cancellation."""
        results, error = self.results, self.error
        self._next, self.results, self.error = iter(()), {}, None
        return results, error


def run(tasks: Sequence[Callable[[], Result]]) -> list[Result]:
    """What the tasks return, in their order, run on the calling thread and on as many workers as there is use for.

    Which thread takes which task is chance: tasks must not depend on one another. Grad mode and inference mode are the
    caller's.

    Raises:
        The first exception of a task, after the tasks that had begun have ended; tasks that had not are left out.
    """
    number = min(num_threads(), len(tasks))
    if number <= 1:
        return [task() for task in tasks]
    with divided():
        work = _Work(tasks)
        pool = _pool.workers
        workers = [pool.submit(work.take) for _ in range(number - 1)]
        try:
            work.take()
        except BaseException as error:  # an interrupt from the keyboard, between two tasks
            work.end(error)
            raise
        finally:
            for worker in workers:
                if not worker.cancel():  # one that has not begun is not waited for
                    worker.result()
    results, error = work.outcome()
    if error is not None:
        raise error
    return [results[number] for number in range(len(tasks))]


def summed(
    task: Callable[[Sequence[Item]], list[torch.Tensor]], items: Sequence[Item], device: torch.device
) -> list[torch.Tensor]:
    """Sums over all items, from new tensors that `task` finds for each share of them on a device."""
    totals, *others = run([partial(task, share) for share in shares(items, device)])
    for other in others:
        for total, part in zip(totals, other, strict=True):
            total += part
    return totals

"""Real processes on this machine that form a process group, for what several of them do together."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Of the group's own; how long a test waits for an answer is longer.
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Raised:
    """What a process answers when its function raised."""

    kind: str
    message: str
    trace: str


class Processes:
    """Gloo ranks that run one function after the other, each on one thread.

    Args:
        size: how many.
        folder: where they find each other.
        timeout: of the groups that functions get, in seconds.

    Functions get a process group, or "world" for all processes; the first two of three or more are a group too.
    """

    def __init__(self, size: int, folder: Path, *, timeout: float = TIMEOUT_SECONDS) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, str(folder / "store"), timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> list[Any]:
        """What `function(group, *arguments)` returns on each of the first `size` ranks; fails where one raised."""
        answers = self.run_and_catch(function, *arguments, size=size)
        for answer in answers:
            assert not isinstance(answer, Raised), answer.trace
        return answers

    def run_and_catch(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> list[Any]:
        """The same; in the place of a result what was raised, or None where the process ended."""
        size = len(self._ends) if size is None else size
        for end in self._ends[:size]:
            end.send_bytes(pickle.dumps((function, arguments, size)))
        return [self._answer(end) for end in self._ends[:size]]

    def _answer(self, end: Connection) -> Any:
        assert end.poll(3 * TIMEOUT_SECONDS), "a process does not answer"
        try:
            return pickle.loads(end.recv_bytes())
        except EOFError:
            return None

    def close(self) -> None:
        """Ends them."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()  # they have nothing left to say, and some may wait for one that is gone
            process.join()


def _serve(rank: int, size: int, store: str, timeout: float, end: Connection) -> None:
    torch.set_num_threads(1)
    # They may start far apart on a loaded machine: only the groups that functions get have the timeout asked for.
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    limit = timedelta(seconds=timeout)
    groups: dict[int, Any] = {size: "world" if timeout == TIMEOUT_SECONDS else dist.new_group(timeout=limit)}
    if size > 2:
        groups[2] = dist.new_group([0, 1], timeout=limit)
    while True:
        try:
            function, arguments, wanted = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            answer = function(groups[wanted], *arguments)
        except Exception as error:
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        # By pickle alone: a pipe's own pickling passes tensors as shared memory of a process that may have ended.
        end.send_bytes(pickle.dumps(answer))

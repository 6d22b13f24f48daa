"""A kernel matrix shared by the processes of a `torch.distributed` group.

Each tile belongs to one rank. An all-reduce adds the partial sums, and must be bitwise equal on all ranks, so that they
decide alike.
"""

import os
import zlib
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gpy_iterative.errors import RankLostError, RanksDisagreeError


def check_group(group: "dist.ProcessGroup | Literal['world'] | None") -> None:
    if group is None:
        return
    is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
    is_foreign = dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER
    if not (is_group or is_foreign or group == "world"):
        raise TypeError(f"process_group must be None, 'world' or a torch.distributed.ProcessGroup, got {group!r}.")
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"process_group={group!r} needs an initialised process group: start the script with torchrun, and call "
            "torch.distributed.init_process_group(...) first."
        )
    if group == "world":
        return
    if is_foreign or dist.get_rank(group) < 0:
        raise ValueError(
            f"This process, rank {dist.get_rank()}, is not in process_group: train in the group's own processes only, or "
            "pass process_group='world'."
        )


class Ranks:
    def __init__(self, group: "dist.ProcessGroup | Literal['world']") -> None:
        check_group(group)
        self._given = group
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    @property
    def _group(self) -> "dist.ProcessGroup | None":
        # The default group is not stored: gloo crashes when a model outlives `destroy_process_group()`.
        return dist.group.WORLD if self._given == "world" else self._given

    @property
    def on_this_machine(self) -> int:
        """Ranks on this machine, by torchrun; otherwise all."""
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", self.size)), self.size)

    def owns(self, i: int, j: int) -> bool:
        """Rows, columns, diagonals and blocks of tiles are shared equally."""
        return (i + j) // 2 % self.size == self.rank

    def part(self, count: int) -> slice:
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def agree(self, description: str, tensors: Sequence[Tensor]) -> None:
        """Checks that all ranks have the same matrix.

        Raises:
            RanksDisagreeError: the description or tensors differ.
            ValueError: the group cannot communicate tensors of this device.
        """
        if self.size == 1:
            return
        device = tensors[0].device
        if device.type == "cpu" and dist.get_backend(self._group) == "nccl":
            raise ValueError(
                "The tensors are on the CPU, but the process group's backend is nccl, which serves CUDA devices: move "
                "model and data to one, or call init_process_group('gloo')."
            )
        self._compare(f"a kernel matrix of {description}", tensors, "other inputs or hyperparameters")

    def sum_(self, partial: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Replaces partial sums by the sums over all ranks.

        Args:
            partial: this rank's sums, overwritten.
            given: the other factors of the sums, equal on every rank.

        Cost: one all-reduce of two numbers per rank, and one of the sums for each dtype.

        Raises:
            RanksDisagreeError: the ranks compute different sums, or `given` differs.
            RankLostError: a rank ended, or did not answer in time.
        """
        if self.size == 1:
            return
        sums = ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in partial)
        self._compare(f"a sum of shape {sums}", given, "other vectors to multiply the kernel matrix by")
        for dtype in dict.fromkeys(tensor.dtype for tensor in partial):
            same = [tensor for tensor in partial if tensor.dtype == dtype]
            message = torch.cat([tensor.reshape(-1) for tensor in same])
            self._all_reduce(message)
            for tensor, total in zip(same, message.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(total.view(tensor.shape))

    def _compare(self, call: str, contents: Sequence[Tensor], difference: str) -> None:
        """Compares by a message of fixed size: backends end the process if sizes differ."""
        checksum = 0
        for tensor in contents:
            checksum = zlib.crc32(tensor.detach().cpu().numpy().tobytes(), checksum)
        facts = torch.zeros(self.size, 2, dtype=torch.int64, device=contents[0].device)
        facts[self.rank, 0], facts[self.rank, 1] = zlib.crc32(call.encode()), checksum
        self._all_reduce(facts)
        calls, checksums = facts.T.tolist()
        self._check(calls, f"something else to compute (here: {call})")
        self._check(checksums, difference)

    def _all_reduce(self, message: Tensor) -> None:
        try:
            dist.all_reduce(message, group=self._group)
        except RuntimeError as error:
            raise RankLostError(
                f"Rank {self.rank} of {self.size} could not sum with the others: a rank ended, did not answer within the "
                "process group's timeout, or computes something else than this one. End all of them, and start them again "
                f"from the last checkpoint (model, optimiser and mll.training_state()). PyTorch's error: {error}"
            ) from error

    def _check(self, checksums: list[int], what: str) -> None:
        others = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[self.rank]]
        if others:
            raise RanksDisagreeError(
                f"Rank(s) {', '.join(map(str, others))} of the process group have {what} than rank {self.rank}. Every rank "
                "has to load the same rows in the same order, start from the same parameters and the same seeds "
                "(torch.manual_seed(0) before the model is built, generator=0), make the same calls (predictions "
                "included), and compute with the same number of threads on the same kind of processor. Nothing was "
                "changed by this product."
            )

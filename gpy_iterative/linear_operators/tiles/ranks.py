"""A kernel matrix spread over several processes: whose tiles are whose, and how their sums come together.

Every rank of a `torch.distributed` process group runs the same program on the same data. Each tile belongs to one rank,
which alone evaluates, keeps and multiplies it; what the ranks have summed up over their own tiles is summed over the ranks
by one all-reduce, whose result is the same on all of them to the last bit. Everything else, vectors, preconditioners,
blocks on the diagonal, factors of small matrices, every rank computes for itself from such numbers. So all ranks take the
same decisions, as long as they start from the same numbers, which each sum checks: a rank that was given other data, or
another seed, would otherwise wait for the others for ever, or quietly spoil their results.
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
    """Does nothing for a process group that this process is a member of, nor for None.

    Raises:
        ValueError: the group is not there yet, or this process is no member of it.
        TypeError: it is no process group.
    """
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
    """The processes that share the products of one matrix.

    Args:
        group: a process group, or "world" for the default one.
    """

    def __init__(self, group: "dist.ProcessGroup | Literal['world']") -> None:
        check_group(group)
        self._given = group
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    @property
    def _group(self) -> "dist.ProcessGroup | None":
        """The group. The default one is not held: a model that outlives `destroy_process_group()` would end gloo badly."""
        return dist.group.WORLD if self._given == "world" else self._given

    @property
    def on_this_machine(self) -> int:
        """How many of them share this machine's memory: what torchrun says, else all."""
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", self.size)), self.size)

    def owns(self, i: int, j: int) -> bool:
        """Whether the tile (i, j) is this rank's.

        Tiles are dealt out in turn, two at a time, with a shift from row to row: so every rank has its share of the matrix,
        of each row, column and diagonal of tiles, and of each block that a solver visits.
        """
        return (i + j) // 2 % self.size == self.rank

    def part(self, count: int) -> slice:
        """A contiguous share of range(count), this rank's."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def agree(self, description: str, tensors: Sequence[Tensor]) -> None:
        """Makes sure that all ranks speak of the same matrix, before they sum up parts of it.

        Args:
            description: what the matrix's shape and tiles depend on.
            tensors: what its entries depend on.

        Raises:
            RanksDisagreeError: they do not.
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
        """Replaces partial sums by those over all ranks.

        Args:
            partial: what is summed up, overwritten.
            given: what the sums were made from, beside the matrix: the same on every rank.

        Cost: one all-reduce for each dtype, of the partial sums' size, after one of two numbers a rank.

        Raises:
            RanksDisagreeError: the ranks sum up something else, or `given` differs between them.
            RankLostError: a rank ended, or did not answer within the group's timeout.
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
        """Every communication begins with this message, of one size: backends end the process where sizes differ."""
        facts = torch.zeros(self.size, 2, dtype=torch.int64, device=contents[0].device)
        facts[self.rank, 0] = zlib.crc32(call.encode())
        facts[self.rank, 1] = _checksum(contents)
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


def _checksum(tensors: Sequence[Tensor]) -> Tensor:
    """A residue of the entries' bits and their order, in exact arithmetic: other tensors have another, but for chance."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        values = tensor.detach()
        values = (values if values.element_size() >= 4 else values.float()).contiguous()
        # As a plain vector first: dimensions of size 1 may have any stride, which a view of other size refuses.
        flat = values.as_strided((values.numel(),), (1,)).view(torch.int32)
        bits = flat.view(values.shape[:-1].numel(), -1) if values.numel() else flat.unsqueeze(0)
        # Odd factors, the same for all rows and then for all columns; int64 wraps around, which is as good as any hash.
        by_row = (bits * _factors(bits.shape[-1], bits.device)).sum(-1)
        total = total * 31 + (by_row * _factors(len(by_row), bits.device)).sum()
    return total


def _factors(count: int, device: torch.device) -> Tensor:
    return (2 * torch.arange(count, device=device) + 1) * 0x9E3779B97F4A7C1 | 1

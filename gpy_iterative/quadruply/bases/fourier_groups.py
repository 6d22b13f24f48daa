"""Random Fourier features by the group: each group is one frequency of every summand of a kernel, as sine and cosine."""

import torch
from gpytorch import kernels
from torch import Tensor

from gpy_iterative.checks import check_count, checked_seed
from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.spectral.densities import Draws, draws_under
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.spectral.summands import Summand, summands

#: Groups whose draws follow from one seed where frequencies are not stored.
CHUNK = 4096


class FourierGroups(torch.nn.Module):
    """The draws of `num_groups` frequencies; what they become depends on a kernel's current hyperparameters.

    Args:
        kernel: scales, sums and products of kernels with a spectral density.
        num_groups: frequencies of each summand.
        num_dims: of the inputs; None takes the kernel's `ard_num_dims`.
        seed: of the draws.
        stored: False draws chunks of 4,096 groups anew, each from a seed of its own, whenever they are asked for (always on
            the CPU): memory O(1) in num_groups, for a step that takes longer.

    Raises:
        ValueError: an unknown number of input dimensions, a kernel with a batch shape.
        SpectralDensityMissingError: a part of the kernel has no random Fourier features.
    """

    def __init__(
        self, kernel: kernels.Kernel, num_groups: int, *, num_dims: int | None, seed: int, stored: bool
    ) -> None:
        super().__init__()
        check_count("num_groups", num_groups)
        seed = checked_seed(seed)
        self.num_groups, self.num_dims, self.stored = num_groups, _num_dims(kernel, num_dims), stored
        parts = self._summands(kernel, _parameter(kernel).new_zeros(1, self.num_dims))
        self.group_size = 2 * len(parts)
        if stored:
            for name, draw in self._draw(kernel, seed, num_groups).items():
                self.register_buffer(_buffer(name), draw)
        else:  # in the state_dict, as stored frequencies are: weights mean nothing without theirs
            self.register_buffer("seed", torch.tensor(seed))

    def features(self, kernel: kernels.Kernel, x: Tensor, groups: Tensor) -> Tensor:
        """[n, g * group_size] at x [n, d]; the features of all groups have the kernel's covariance in expectation."""
        scale = (len(groups) / self.num_groups) ** 0.5  # each of them is divided by the number of groups that it sees
        parts = self._summands(kernel, x)
        draws = self._draws(kernel, groups)
        if torch.is_grad_enabled():
            for part in parts:
                for factor in part.factors:
                    factor.check_differentiable()
        every = slice(None)
        blocks = [
            part.features(every, [factor.frequencies(draws_under(factor.name, draws)) for factor in part.factors])
            for part in parts
        ]
        return scale * torch.cat(blocks, dim=-1)

    def prior_variance(self, kernel: kernels.Kernel, x: Tensor) -> Tensor:
        """The variance that all groups have together at every x, [n]: squared sines and cosines add up to one."""
        parts = self._summands(kernel, x)
        total = sum((1.0 if part.scale is None else part.scale for part in parts), x.new_zeros(()))
        return total.expand(x.shape[0])

    def _summands(self, kernel: kernels.Kernel, x: Tensor) -> list[Summand]:
        if x.shape[-1] != self.num_dims:
            raise ValueError(f"The basis has frequencies for {self.num_dims} input dimensions, got {x.shape[-1]}.")
        active = x if kernel.active_dims is None else x.index_select(-1, kernel.active_dims)
        parts = summands([KernelTerm(kernel, active)])
        for part in parts:
            if part.exact is not None:
                raise SpectralDensityMissingError(
                    f"{type(part.exact[0]).__name__} has finitely many features of its own and no random ones. "
                    "InducingPointBasis takes any kernel."
                )
        return parts

    def _draw(self, kernel: kernels.Kernel, seed: int, count: int) -> Draws:
        parameter = _parameter(kernel)
        active = torch.zeros(1, self.num_dims, dtype=parameter.dtype)
        if kernel.active_dims is not None:
            active = active.index_select(-1, kernel.active_dims.cpu())
        generator = torch.Generator().manual_seed(seed)
        draws = RandomFourierFeatures(count).draw([KernelTerm(kernel, active)], generator)
        return {name: draw.to(parameter) for name, draw in draws.items()}

    def _draws(self, kernel: kernels.Kernel, groups: Tensor) -> Draws:
        if self.stored:
            return {_name(name): buffer.index_select(-1, groups) for name, buffer in self.named_buffers(recurse=False)}
        chunks, which = (groups // CHUNK).unique(return_inverse=True)
        seed = int(self.seed)
        drawn = [self._draw(kernel, _seed_of(seed, int(chunk)), CHUNK) for chunk in chunks]
        position = which * CHUNK + groups % CHUNK
        return {
            name: torch.cat([draws[name] for draws in drawn], dim=-1).to(groups.device).index_select(-1, position)
            for name in drawn[0]
        }


def _seed_of(seed: int, chunk: int) -> int:
    """Neighbouring seeds must not share chunks: a prime above 2^32 keeps them apart."""
    return (seed * 4_294_967_311 + chunk) % 2**63


def _num_dims(kernel: kernels.Kernel, num_dims: int | None) -> int:
    if kernel.batch_shape:
        raise ValueError(f"A basis needs a kernel without batch shape, got {tuple(kernel.batch_shape)}.")
    if num_dims is not None:
        check_count("num_dims", num_dims)
        return num_dims
    found = {part.ard_num_dims for part in kernel.modules() if isinstance(part, kernels.Kernel)} - {None}
    selects = any(isinstance(part, kernels.Kernel) and part.active_dims is not None for part in kernel.modules())
    if len(found) != 1 or selects:
        raise ValueError(
            "num_dims, the number of columns of the inputs, cannot be told from this kernel: pass it, num_dims=x.shape[-1]."
        )
    return found.pop()


def _parameter(kernel: kernels.Kernel) -> Tensor:
    return next(kernel.parameters()).detach()


def _buffer(name: str) -> str:
    return name.replace(".", "__")


def _name(buffer: str) -> str:
    return buffer.replace("__", ".")

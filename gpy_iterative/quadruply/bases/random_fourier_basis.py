"""Random Fourier features; a group has sine and cosine per summand."""

import torch
from gpytorch import kernels
from torch import Tensor

from gpy_iterative.checks import check_count, check_flag, checked_seed
from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.kernel_functions import kernel_diagonal
from gpy_iterative.linear_operators.prior_parts import KernelTerm
from gpy_iterative.linear_operators.radial_inputs import active_inputs
from gpy_iterative.quadruply.bases.feature_basis import FeatureBasis, check_columns, check_kernel
from gpy_iterative.spectral.densities import Draws
from gpy_iterative.spectral.features import RandomFourierFeatures
from gpy_iterative.spectral.summands import summands

#: Groups per seed.
CHUNK = 4096


class FourierGroups(torch.nn.Module):
    """Draws of frequencies, which a kernel's current hyperparameters scale.

    If not `stored`, every evaluation draws them in chunks, with a seed each.
    """

    def __init__(
        self, kernel: kernels.Kernel, num_features: int, *, num_dims: int | None, seed: int, stored: bool
    ) -> None:
        super().__init__()
        seed = checked_seed(seed)
        self.num_dims, self.stored = _num_dims(kernel, num_dims), stored
        parts = summands([self._term(kernel, next(kernel.parameters()).detach().new_zeros(1, self.num_dims))])
        for part in parts:
            if part.exact is not None:
                raise SpectralDensityMissingError(
                    f"{type(part.exact[0]).__name__} has no random Fourier features. Use NystromBasis without a tail, "
                    "which takes any kernel."
                )
        self.group_size = 2 * len(parts)
        if num_features % self.group_size:
            raise ValueError(
                f"num_features must be a multiple of {self.group_size}, a sine and a cosine for each kernel of the sum, "
                f"got {num_features}."
            )
        self.num_groups = num_features // self.group_size
        if stored:
            for name, draw in self._draw(kernel, seed, self.num_groups).items():
                self.register_buffer(name.replace(".", "__"), draw)
        else:  # a buffer, since weights belong to frequencies
            self.register_buffer("seed", torch.tensor(seed))

    def features(self, kernel: kernels.Kernel, x: Tensor, groups: Tensor) -> Tensor:
        """[n, g * group_size]; all groups have the kernel as expected covariance."""
        scale = (len(groups) / self.num_groups) ** 0.5  # features divide by the number of evaluated groups
        made = RandomFourierFeatures(len(groups))
        features = made.differentiable if torch.is_grad_enabled() else made.features
        return scale * features([self._term(kernel, x)], self._draws(kernel, groups))

    def _term(self, kernel: kernels.Kernel, x: Tensor) -> KernelTerm:
        check_columns(x, self.num_dims)
        return KernelTerm(kernel, active_inputs(kernel, x))

    def _draw(self, kernel: kernels.Kernel, seed: int, count: int) -> Draws:
        parameter = next(kernel.parameters()).detach()
        term = self._term(kernel, parameter.new_zeros(1, self.num_dims))
        draws = RandomFourierFeatures(count).draw([term], torch.Generator().manual_seed(seed))
        return {name: draw.to(parameter) for name, draw in draws.items()}

    def _draws(self, kernel: kernels.Kernel, groups: Tensor) -> Draws:
        if self.stored:
            stored = self.named_buffers(recurse=False)
            return {name.replace("__", "."): buffer.index_select(-1, groups) for name, buffer in stored}
        chunks, which = (groups // CHUNK).unique(return_inverse=True)
        seed = int(self.seed)
        # A prime above 2^32, so that neighbouring seeds share no chunks.
        seeds = [(seed * 4_294_967_311 + int(chunk)) % 2**63 for chunk in chunks]
        drawn = [self._draw(kernel, own, CHUNK) for own in seeds]
        position = which * CHUNK + groups % CHUNK
        return {
            name: torch.cat([draws[name] for draws in drawn], dim=-1).to(groups.device).index_select(-1, position)
            for name in drawn[0]
        }


class RandomFourierBasis(FeatureBasis):
    """Random Fourier features: sines and cosines whose expected covariance is the kernel; S = I.

    Beyond n outputscale / noise features, variances stay near the prior's and the bound cannot learn hyperparameters.
    `NystromBasis` avoids both.

    Args:
        kernel: scales, sums and products of kernels with a spectral density.
        num_features: m, a multiple of 2 for each summand.
        num_dims: of the inputs; None takes `ard_num_dims`.
        seed: of the frequencies.
        store_frequencies: keep d m / 2 numbers; False draws them in every step.

    Raises:
        ValueError: an odd num_features, unknown num_dims, a batch of kernels.
        SpectralDensityMissingError: a kernel without random Fourier features.
    """

    exchangeable = True

    def __init__(
        self,
        kernel: kernels.Kernel,
        num_features: int,
        *,
        num_dims: int | None = None,
        seed: int = 0,
        store_frequencies: bool = True,
    ) -> None:
        super().__init__()
        check_count("num_features", num_features)
        check_flag("store_frequencies", store_frequencies)
        self.kernel = kernel
        self.fourier = FourierGroups(kernel, num_features, num_dims=num_dims, seed=seed, stored=store_frequencies)
        self.num_groups, self.group_size = self.fourier.num_groups, self.fourier.group_size

    def group_features(self, x: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        return self.fourier.features(self.kernel, x, groups)

    def group_prior_variance(self, x: Tensor, head: Tensor) -> Tensor:
        check_columns(x, self.fourier.num_dims)
        return kernel_diagonal(self.kernel, x)


def _num_dims(kernel: kernels.Kernel, num_dims: int | None) -> int:
    check_kernel(kernel)
    if num_dims is not None:
        check_count("num_dims", num_dims)
        return num_dims
    found = {part.ard_num_dims for part in kernel.modules() if isinstance(part, kernels.Kernel)} - {None}
    selects = any(isinstance(part, kernels.Kernel) and part.active_dims is not None for part in kernel.modules())
    if len(found) != 1 or selects:
        raise ValueError(
            f"The number of input columns does not follow from this {type(kernel).__name__}: pass num_dims=x.shape[-1]."
        )
    return found.pop()

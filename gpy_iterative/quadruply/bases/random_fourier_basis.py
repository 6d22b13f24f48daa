"""Random Fourier features, any number of them."""

from gpytorch import kernels
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.quadruply.bases.feature_basis import FeatureBasis
from gpy_iterative.quadruply.bases.fourier_groups import FourierGroups


class RandomFourierBasis(FeatureBasis):
    """Pairs of sines and cosines whose covariance is the kernel's in expectation; S = I.

    Args:
        kernel: scales, sums and products of kernels with a spectral density (RBF, Matern, RQ, registered ones). Each
            summand of a sum has a pair in every group.
        num_features: m, a multiple of the size of a group (2 for a kernel without sums).
        num_dims: of the inputs; None takes the kernel's `ard_num_dims`.
        seed: of the frequencies.
        store_frequencies: keep d m / 2 numbers; False draws what a step needs from seeds, each time.

    Raises:
        ValueError: an odd num_features, an unknown number of dimensions, a kernel with a batch shape.
        SpectralDensityMissingError: a kernel without random Fourier features.

    Where m is beyond n outputscale / noise, independent posterior deviations of so many features leave variances close to
    the prior's, and an evidence that hyperparameters cannot be learned from. `NystromBasis` has neither problem.
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
        self.kernel = kernel
        # One group would do to tell their size; what is refused is refused before any memory is taken.
        probe = FourierGroups(kernel, 1, num_dims=num_dims, seed=seed, stored=False)
        if num_features % probe.group_size:
            raise ValueError(
                f"num_features must be a multiple of {probe.group_size}, the sines and cosines of one frequency of every "
                f"summand of the kernel; got {num_features}."
            )
        count = num_features // probe.group_size
        self.fourier = FourierGroups(kernel, count, num_dims=num_dims, seed=seed, stored=store_frequencies)
        self.num_groups, self.group_size = count, probe.group_size

    def group_features(self, x: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        """[n, g * group_size]; cost n g (d + 2)."""
        return self.fourier.features(self.kernel, x, groups)

    def group_prior_variance(self, x: Tensor, head: Tensor) -> Tensor:
        """The kernel's variance."""
        return self.fourier.prior_variance(self.kernel, x)

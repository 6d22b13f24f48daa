"""Interface of the bases of a weight-space Gaussian process.

f(x) = mean(x) + phi(x) w with w ~ N(0, S^-1). Features come in two parts: a head, which every step evaluates, and groups of
`group_size` features (a sine and its cosine), of which a step evaluates a few.
"""

from abc import ABC, abstractmethod

import gpytorch
import torch
from gpytorch.kernels import Kernel
from torch import Tensor


def check_kernel(kernel: Kernel) -> None:
    """Raises TypeError for what is no kernel, and ValueError for a batch of kernels."""
    if not isinstance(kernel, Kernel):
        raise TypeError(f"A basis needs a gpytorch.kernels.Kernel, got {kernel!r}.")
    if kernel.batch_shape:
        raise ValueError(
            f"A basis needs a kernel without batch shape, got {tuple(kernel.batch_shape)}: make one basis for each kernel."
        )


class FeatureBasis(gpytorch.Module, ABC):
    """Base class of all bases. Features are differentiable in x and the hyperparameters.

    Attributes:
        num_head_features: number of features that are always evaluated.
        num_groups: number of groups that are sampled.
        group_size: features of a group.
        exchangeable: the order of groups is arbitrary, so that consecutive ones are a random sample.
        has_diagonal_prior: S is diagonal.
    """

    num_head_features: int = 0
    num_groups: int
    group_size: int = 1
    exchangeable: bool = False
    has_diagonal_prior: bool = True

    @property
    def num_features(self) -> int:
        """m, of head and groups."""
        return self.num_head_features + self.num_groups * self.group_size

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the inputs."""
        return next(tensor for tensor in (*self.parameters(), *self.buffers()) if tensor.is_floating_point())

    @property
    def knows_group_variance(self) -> bool:
        """Whether `group_prior_variance` is known."""
        return type(self).group_prior_variance is not FeatureBasis.group_prior_variance

    def sampled_parameters(self) -> list[torch.nn.Parameter]:
        """Hyperparameters with a row for each feature, of which a step moves a few. Adam does not suit them."""
        return []

    def feature_parameters(self) -> list[torch.nn.Parameter]:
        """All other hyperparameters, on which features depend."""
        sampled = {id(parameter) for parameter in self.sampled_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in sampled]

    def settle(self) -> None:
        """Called by the first training step: fixes what is to stay when hyperparameters move."""

    def head_features(self, x: Tensor) -> Tensor:
        """[n, num_head_features] at inputs x [n, d]."""
        return x.new_empty(x.shape[0], 0)

    @abstractmethod
    def group_features(self, x: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        """[n, g * group_size]: first members of all groups, then second members, ...

        Args:
            x: inputs [n, d].
            head: `head_features(x)`.
            groups: [g], int64.
        """

    def feature_index(self, groups: Tensor) -> Tensor:
        """Index of the columns of `group_features` in the features of all groups, [g * group_size]."""
        members = torch.arange(self.group_size, device=groups.device)
        return (groups * self.group_size + members.unsqueeze(-1)).flatten()

    def prior_precision(self, groups: Tensor) -> Tensor | None:
        """The diagonal of S at the features of groups, [g * group_size]; None where S = I."""
        return None

    def prior_precision_block(self, rows: Tensor, columns: Tensor) -> Tensor:
        """S at the features of two sets of groups, for a basis with a dense S, without head and with group_size 1."""
        raise NotImplementedError(f"{type(self).__name__} has a diagonal prior.")

    def prior_log_determinant(self) -> Tensor | None:
        """log|S| of a dense S; None where S is too large to be factored."""
        return None

    def group_prior_variance(self, x: Tensor, head: Tensor) -> Tensor | None:
        """Prior variance of f(x) from all groups, [n], where it is known without evaluating them.

        All groups can then share one posterior deviation, whose part of the variance is exact.
        """
        return None

    def group_prior_covariance(self, x: Tensor, head: Tensor) -> Tensor | None:
        """Covariance to `group_prior_variance`, [n, n]; None where it is that of the features as drawn."""
        return None

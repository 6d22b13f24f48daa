"""Interface of bases."""

from abc import ABC, abstractmethod

import gpytorch
import torch
from gpytorch.kernels import Kernel
from torch import Tensor


def check_kernel(kernel: Kernel) -> None:
    if not isinstance(kernel, Kernel):
        raise TypeError(f"A basis needs a gpytorch.kernels.Kernel, got {kernel!r}.")
    if kernel.batch_shape:
        raise ValueError(
            f"A basis needs a kernel without batch shape, got {tuple(kernel.batch_shape)}: make one basis for each kernel."
        )
    point = torch.zeros(1, 1, device="cpu")
    if kernel.num_outputs_per_input(point, point) != 1:
        raise ValueError(
            f"A basis needs a kernel of one output, and {type(kernel).__name__} has several: take one model for each "
            "output, or for correlated ones an exact model with HutchinsonMarginalLogLikelihood."
        )


def check_columns(x: Tensor, num_dims: int) -> None:
    if x.shape[-1] != num_dims:
        raise ValueError(
            f"The basis was made for inputs with {num_dims} columns, got {x.shape[-1]}: pass the same columns, or make "
            "another basis."
        )


class FeatureBasis(gpytorch.Module, ABC):
    """Features phi of f(x) = mean(x) + phi(x) w, w ~ N(0, S^-1), differentiable in x and hyperparameters.

    Every step evaluates the head and a few groups.

    Attributes:
        num_head_features: features of the head.
        num_groups: groups to sample from.
        group_size: features of a group.
        exchangeable: consecutive groups are a random sample.
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
        """Gives dtype and device."""
        return next(tensor for tensor in (*self.parameters(), *self.buffers()) if tensor.is_floating_point())

    def sampled_parameters(self) -> list[torch.nn.Parameter]:
        """Hyperparameters with a row per feature; a step moves few rows."""
        return []

    def feature_parameters(self) -> list[torch.nn.Parameter]:
        """Other hyperparameters of features."""
        sampled = {id(parameter) for parameter in self.sampled_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in sampled]

    def settle(self) -> None:
        """The first training step fixes here what must not follow hyperparameters."""

    def head_features(self, x: Tensor) -> Tensor:
        """[n, num_head_features] at x [n, d]."""
        return x.new_empty(x.shape[0], 0)

    @abstractmethod
    def group_features(self, x: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        """[n, g * group_size] for groups [g]: first members of all groups, then second members, ...

        `head` is `head_features(x)`.
        """

    def feature_index(self, groups: Tensor) -> Tensor:
        """Index of `group_features` among all groups' features."""
        members = torch.arange(self.group_size, device=groups.device)
        return (groups * self.group_size + members.unsqueeze(-1)).flatten()

    def prior_precision(self, groups: Tensor) -> Tensor:
        """Diagonal of S [g * group_size]."""
        return self.like.new_ones(len(groups) * self.group_size)

    def prior_precision_block(self, rows: Tensor, columns: Tensor) -> Tensor:
        """S at two sets of groups, if dense (without head, group_size 1)."""
        raise NotImplementedError(f"{type(self).__name__} has a diagonal prior.")

    def prior_log_determinant(self) -> Tensor | None:
        """log|S|; None if S is too large to factorise."""
        return None

    def group_prior_variance(self, x: Tensor, head: Tensor) -> Tensor | None:
        """Prior variance [n] from all groups, if known without their features."""
        return None

    def group_prior_covariance(self, x: Tensor, head: Tensor) -> Tensor | None:
        """Covariance [n, n] to `group_prior_variance`; None takes the features'."""
        return None

"""The models of the benchmarks: Matern-3/2 with a lengthscale per input, and a plain squared exponential."""

import gpytorch
import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.datasets import Split


def matern_kernel(
    x: Tensor, kind: type[gpytorch.kernels.Kernel] = gpytorch.kernels.MaternKernel
) -> gpytorch.kernels.ScaleKernel:
    """Scaled Matern-3/2 ARD for inputs such as x [n, d]; all hyperparameters start at 1, the papers' start."""
    kernel = gpytorch.kernels.ScaleKernel(kind(nu=1.5, ard_num_dims=x.shape[-1])).to(x)
    kernel.base_kernel.lengthscale = 1.0
    kernel.outputscale = 1.0
    return kernel


class MaternRegression(gpytorch.models.ExactGP):
    """Zero mean and `matern_kernel`; the noise starts at 1 too.

    Args:
        split: training data.
        kernel: GPyTorch's Matern kernel, or that of its KeOps kernels.
        scales: softplus gives the scales of signal and noise, the papers' parameters, and not their variances.
    """

    def __init__(
        self,
        split: Split,
        *,
        kernel: type[gpytorch.kernels.Kernel] = gpytorch.kernels.MaternKernel,
        scales: bool = False,
    ) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(split.train_x)
        super().__init__(split.train_x, split.train_y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = matern_kernel(split.train_x, kernel)
        if scales:
            self.covar_module.register_constraint("raw_outputscale", _positive_scale())
            likelihood.noise_covar.register_constraint("raw_noise", _positive_scale())
            self.covar_module.outputscale = 1.0
        likelihood.noise = 1.0

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def flat_parameters(self) -> Tensor:
        """All raw parameters in one vector."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters()])

    def flat_gradient(self) -> Tensor:
        """All gradients in one vector."""
        return torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters() if parameter.grad is not None])

    def set_flat_parameters(self, values: Tensor) -> None:
        """The inverse of `flat_parameters`."""
        sizes = [parameter.numel() for parameter in self.parameters()]
        for parameter, part in zip(self.parameters(), values.split(sizes), strict=True):
            parameter.data.copy_(part.view_as(parameter))


def _positive_scale() -> gpytorch.constraints.Positive:
    """A variance whose root is the softplus of the parameter."""
    return gpytorch.constraints.Positive(
        transform=lambda value: softplus(value).square(), inv_transform=lambda value: value.sqrt().expm1().log()
    )


class SquaredExponentialRegression(gpytorch.models.ExactGP):
    """A scaled RBF kernel, the model of Potapczynski et al. 2021.

    Args:
        x, y: training data.
        ard: a lengthscale for each input (their trainings), or one for all (their figure 1).
        constant: a learned constant mean, or zero.
    """

    def __init__(self, x: Tensor, y: Tensor, *, ard: bool, constant: bool) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x)
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean() if constant else gpytorch.means.ZeroMean()
        base = gpytorch.kernels.RBFKernel(ard_num_dims=x.shape[-1] if ard else None)
        self.covar_module = gpytorch.kernels.ScaleKernel(base)
        self.to(x)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

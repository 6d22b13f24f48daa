"""Models in weight space with explicit features, whose weights tests set and read as dense matrices."""

import gpytorch
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.models import FeatureBasis, QuadruplyStochasticGP
from gpy_iterative.quadruply.known_points import KnownLatent
from tests.quadruply.weight_space import quasi_normal


class TableBasis(FeatureBasis):
    """Features from a table: x [n, 1] holds row numbers. Any prior precision, diagonal or not."""

    def __init__(self, phi: Tensor, precision: Tensor | None = None, group_size: int = 1) -> None:
        super().__init__()
        self.register_buffer("phi", phi)
        self.register_buffer("precision", precision)
        self.has_diagonal_prior = precision is None or precision.dim() == 1
        self.group_size = group_size
        self.num_groups = phi.shape[1] // group_size

    def group_features(self, x: Tensor, head: Tensor, groups: Tensor) -> Tensor:
        return self.phi[x[:, 0].long()][:, self.feature_index(groups)]

    def prior_precision(self, groups: Tensor) -> Tensor:
        if self.precision is None:
            return super().prior_precision(groups)
        diagonal = self.precision if self.has_diagonal_prior else self.precision.diagonal()
        return diagonal[self.feature_index(groups)]

    def prior_precision_block(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.precision[rows][:, columns]

    def prior_log_determinant(self) -> Tensor:
        return torch.logdet(self.precision)


def row_numbers(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64).unsqueeze(-1)


def random_features(n: int, m: int) -> tuple[Tensor, Tensor]:
    """Phi [n, m] and targets [n]."""
    return 0.5 * quasi_normal(n, m, root=7.0), quasi_normal(n, root=11.0)


def set_weights(model: QuadruplyStochasticGP, mean: Tensor, root: Tensor) -> None:
    """Mu [m] and the chevron C [m, m], for a basis without a head of its own."""
    weights, k = model.weights, model.weights.num_dense_columns
    h = weights.num_head
    with torch.no_grad():
        weights.head_mean.copy_(mean[:h])
        weights.tail_mean.copy_(mean[h:, None])
        weights.head_columns.copy_(root[:h, :k])
        weights.tail_columns.copy_(root[h:, :k])
        weights.head_log_diagonal.copy_(root.diagonal()[:h].log())
        tail = root.diagonal()[h:].log()
        weights.tail_log_diagonal.copy_(tail.mean() if weights.shared_diagonal else tail[:, None])
        weights.initialized.fill_(1)


def weights_of(m: int, k: int) -> tuple[Tensor, Tensor]:
    """Mu [m] and a chevron C [m, m] with k dense columns."""
    root = 0.3 * quasi_normal(m, m, root=17.0).tril(-1)
    root[:, k:] = 0
    return 0.5 * quasi_normal(m, root=13.0), root + torch.diag(0.3 + quasi_normal(m, root=19.0).abs())


def known_latent(mll: gpi.mlls.QuadruplyStochasticELBO) -> KnownLatent:
    """The state at the kept rows or control points of a run."""
    return KnownLatent(**mll._run.parts["latent"])


def gaussian_likelihood(noise: float) -> gpytorch.likelihoods.GaussianLikelihood:
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = torch.tensor(noise, dtype=torch.float64)
    return likelihood


class OwnVariancesBasis(gpi.models.RandomFourierBasis):
    """Without a known variance of its groups, so that every feature has a diagonal entry of its own."""

    group_prior_variance = FeatureBasis.group_prior_variance


def fourier_problem(
    n: int = 60, m: int = 40, *, shared_diagonal: bool = True, **options
) -> tuple[QuadruplyStochasticGP, Tensor, Tensor]:
    """An RFF model in float64 with inputs [n, 2] and targets [n]."""
    x = quasi_normal(n, 2, root=2.0)
    y = torch.sin(1.5 * x[:, 0]) + 0.3 * quasi_normal(n, root=11.0)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = 0.9
    kernel.outputscale = 1.3
    basis = (gpi.models.RandomFourierBasis if shared_diagonal else OwnVariancesBasis)(kernel, m, seed=1)
    return QuadruplyStochasticGP(basis, **options), x, y

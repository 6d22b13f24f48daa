"""Priors of several functions as one system, and the operator of a shared kernel."""

import unittest

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, latent_prior
from gpy_iterative.linear_operators.latent import latent_operator, point_blocks
from tests.laplace.cases import inputs


class TestRepeatedKernel(LinearOperatorTestCase, unittest.TestCase):
    seed = 4
    should_test_sample = True

    def create_linear_op(self) -> LinearOperator:
        root = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
        matrix = (root @ root.mT + 4 * torch.eye(4)).requires_grad_()
        return latent_operator(to_linear_operator(matrix), 3, shared=True)

    def evaluate_linear_op(self, linear_op: LinearOperator) -> Tensor:
        return torch.kron(linear_op.linear_ops[0].to_dense(), torch.eye(3))

    # Upstream's reference differentiates eigenvectors. Here each eigenvalue is there three times: these have no derivative.
    def test_sqrt_inv_matmul(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._check_root(torch.randn(2, 12, generator=generator), torch.randn(12, 3, generator=generator))

    def test_sqrt_inv_matmul_no_lhs(self) -> None:
        self._check_root(None, torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))

    # Upstream compares eigenvectors, which are not unique here.
    def test_eigh(self) -> None:
        self._check_eigenvectors(*torch.linalg.eigh(self.create_linear_op()))

    def test_diagonalization(self) -> None:
        self._check_eigenvectors(*self.create_linear_op().diagonalization())

    def test_diagonalization_symeig(self) -> None:
        self._check_eigenvectors(*self.create_linear_op().diagonalization(method="symeig"))

    def _check_eigenvectors(self, values: Tensor, vectors: LinearOperator) -> None:
        dense, operator = vectors.to_dense(), self.create_linear_op()
        torch.testing.assert_close(dense.mT @ dense, torch.eye(12))
        torch.testing.assert_close((dense * values) @ dense.mT, self.evaluate_linear_op(operator))

    def _check_root(self, lhs: Tensor | None, rhs: Tensor) -> None:
        operator = self.create_linear_op().detach().requires_grad_(True)
        matrix = operator.linear_ops[0].to_dense().detach().requires_grad_()
        values, vectors = torch.linalg.eigh(matrix)
        root = torch.kron(vectors @ (values.rsqrt().unsqueeze(-1) * vectors.mT), torch.eye(3))
        if lhs is None:
            found, expected = (operator.sqrt_inv_matmul(rhs),), (root @ rhs,)
        else:
            found = operator.sqrt_inv_matmul(rhs, lhs)
            expected = (lhs @ root @ rhs, (lhs @ root).square().sum(-1))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        (kernel,) = (tensor for tensor in operator.representation() if tensor.requires_grad)
        (derivative,) = torch.autograd.grad(sum(one.sum() for one in found), kernel)
        (reference,) = torch.autograd.grad(sum(other.sum() for other in expected), matrix)
        torch.testing.assert_close(derivative + derivative.mT, reference + reference.mT, rtol=1e-2, atol=1e-2)


def dense_by_hand(matrices: Tensor) -> Tensor:
    """[C, n, n] as [n C, n C], points first."""
    latents, points, _ = matrices.shape
    result = torch.zeros(points, latents, points, latents, dtype=matrices.dtype)
    for latent in range(latents):
        result[:, latent, :, latent] = matrices[latent]
    return result.view(points * latents, -1)


@pytest.mark.parametrize("kind", ["one", "own", "shared", "multitask", "coregionalised"])
def test_layouts(kind: str) -> None:
    x = inputs(7)
    batch = torch.Size([3]) if kind in ("own", "multitask") else torch.Size([])
    kernel = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=batch), batch_shape=batch).double()
    if batch:
        kernel.outputscale = torch.tensor([1.0, 2.0, 3.0])
    mean = torch.arange(21.0, dtype=torch.float64).view(3, 7)
    if kind == "one":
        prior = latent_prior(MultivariateNormal(mean[0], kernel(x)), KernelProducts())
        expected, means = kernel(x).to_dense(), mean[:1].mT
    elif kind == "coregionalised":
        kernel = kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=3, rank=1).double()
        prior = latent_prior(MultitaskMultivariateNormal(mean.mT, kernel(x)), KernelProducts())
        expected, means = kernel(x).to_dense(), mean.mT
    else:
        dist = MultivariateNormal(mean, kernel(x))
        if kind == "multitask":
            dist = MultitaskMultivariateNormal.from_batch_mvn(dist)
        prior = latent_prior(dist, KernelProducts())
        expected, means = dense_by_hand(kernel(x).to_dense().expand(3, 7, 7)), mean.mT
    expected = expected.detach()
    torch.testing.assert_close(prior.mean, means)
    torch.testing.assert_close(prior.operator.to_dense().detach(), expected)
    columns = torch.sin(torch.arange(2.0 * len(expected), dtype=torch.float64)).view(-1, 2)
    torch.testing.assert_close(prior.matmul(columns), expected @ columns)
    blocks = point_blocks(prior.operator, prior.num_latents).detach()
    for point in range(7):
        rows = slice(point * prior.num_latents, (point + 1) * prior.num_latents)
        torch.testing.assert_close(blocks[point], expected[rows, rows])


def test_priors_that_are_refused() -> None:
    x = inputs(5)
    kernel = kernels.RBFKernel().double()
    with pytest.raises(ValueError, match="one set of latent functions"):
        latent_prior(MultivariateNormal(torch.zeros(2, 3, 5).double(), kernel(x)), KernelProducts())
    flat = MultitaskMultivariateNormal(
        torch.zeros(5, 2).double(), gpytorch.kernels.MultitaskKernel(kernel, num_tasks=2)(x), interleaved=False
    )
    with pytest.raises(ValueError, match="interleaved"):
        latent_prior(flat, KernelProducts())

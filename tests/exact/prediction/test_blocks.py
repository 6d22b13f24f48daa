"""Parts of every kind of prior covariance against the dense matrix."""

import gpytorch
import pytest
import torch
from linear_operator import LinearOperator

from gpy_iterative.exact.prediction.blocks import principal_blocks, row_block, row_group
from gpy_iterative.exact.prediction.joint_prior import joint_prior
from gpy_iterative.linear_operators import KernelProducts, interpolated, noisy_operator, operator_of_kernel
from gpy_iterative.training.training_system import prior_at
from tests.exact.gaussian_models import CASES
from tests.exact.prediction.test_posterior import held_out_points


def operators(name: str) -> tuple[LinearOperator, LinearOperator]:
    """H and K(x, X)."""
    case = CASES[name]()
    case.model.eval()
    products = KernelProducts(tile_size=16)
    prior = prior_at(case.model, [case.x])
    joint = joint_prior(case.model, [held_out_points(6)], prior.batch_shape, products)
    return noisy_operator(case.likelihood, prior, *case.params, products=products), joint.test_train


def index_of(shape: tuple[int, ...], size: int) -> torch.Tensor:
    return torch.randint(size, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(CASES))
def test_principal_blocks(name: str) -> None:
    operator, _ = operators(name)
    dense = operator.to_dense().detach()
    for extra in ((), (2,)):
        index = index_of((*extra, *operator.batch_shape, 3, 5), operator.shape[-1])
        blocks = principal_blocks(operator, index)
        full = dense.expand(*extra, *dense.shape).unsqueeze(-3).expand(*index.shape[:-1], *dense.shape[-2:])
        rows = full.gather(-2, index.unsqueeze(-1).expand(*index.shape, dense.shape[-1]))
        wanted = rows.gather(-1, index.unsqueeze(-2).expand(*index.shape, index.shape[-1]))
        torch.testing.assert_close(blocks, wanted)


@pytest.mark.parametrize(
    "name", ["matern-3/2", "sum-in-forward", "product", "linear", "batch", "multitask", "spectral-mixture"]
)
def test_row_blocks(name: str) -> None:
    _, cross = operators(name)
    group = row_group(cross)
    assert group == (2 if name == "multitask" else 1)
    rows = slice(2 * group, 5 * group)
    torch.testing.assert_close(row_block(cross, rows).to_dense(), cross.to_dense()[..., rows, :])


def test_interleaved_batches_are_cut_at_whole_points() -> None:
    x = held_out_points(5)
    kernel = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([3])).double()
    prior = gpytorch.distributions.MultitaskMultivariateNormal.from_batch_mvn(
        gpytorch.distributions.MultivariateNormal(torch.zeros(3, 5, dtype=torch.float64), kernel(x))
    )
    operator = prior.lazy_covariance_matrix.evaluate_kernel()
    assert row_group(operator) == 3
    torch.testing.assert_close(row_block(operator, slice(3, 12)).to_dense(), operator.to_dense()[3:12])


@pytest.mark.parametrize("are_near", [True, False])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_blocks_of_an_interpolated_kernel(dimensions: int, are_near: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near rows share their nodes; the grid's entries between them are fewer than those of its columns."""
    kernel = gpytorch.kernels.GridInterpolationKernel(
        gpytorch.kernels.RBFKernel(), grid_size=40, num_dims=dimensions, grid_bounds=[(-4.0, 4.0)] * dimensions
    ).double()
    x = torch.linspace(-3, 3, 20, dtype=torch.float64).unsqueeze(-1).expand(20, dimensions)
    x = 0.1 * x if are_near else x
    with torch.no_grad():
        operator = operator_of_kernel(kernel, x, None, KernelProducts())
        assert isinstance(operator, interpolated.GridLinearOperator)
        index = index_of((7, 5), 20) if are_near else torch.arange(20).view(1, 20)
        dense = operator.to_dense()
        unused = (type(operator.base_linear_op), "_matmul") if are_near else (interpolated, "principal_blocks")
        monkeypatch.setattr(*unused, None)
        torch.testing.assert_close(
            principal_blocks(operator, index), dense[index.unsqueeze(-1), index.unsqueeze(-2)], rtol=1e-6, atol=1e-8
        )

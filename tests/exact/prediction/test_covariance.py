"""The lazy covariance: chunks, slices, structure, and linear_operator's own conformance suite."""

import unittest
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import to_linear_operator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpy_iterative.exact.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.exact.prediction.joint_prior import JointPrior
from gpy_iterative.exact.prediction.projection import GalerkinProjection
from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import ConjugateGradients
from tests.exact.gaussian_models import CASES, Regression
from tests.exact.prediction.test_posterior import held_out_points


class Source:
    """A source that has its projection ready."""

    def __init__(self, basis: Tensor) -> None:
        self.basis = basis

    def projection(self) -> GalerkinProjection:
        return GalerkinProjection(self.basis, None)

    def check(self, *args: Any) -> None:
        """No training data to check with."""


class TestPosteriorCovarianceConforms(LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    should_test_sample = True
    should_call_cg = should_call_lanczos = False

    def create_linear_op(self) -> PosteriorCovarianceLinearOperator:
        generator = torch.Generator().manual_seed(1)
        root = torch.randn(5, 5, generator=generator)
        cross = torch.randn(5, 4, generator=generator)
        columns = 0.3 * torch.randn(4, 3, generator=generator)
        # test_test exceeds what is taken from it: the difference is well conditioned.
        taken = (cross @ columns) @ (cross @ columns).mT
        test_test = root @ root.mT + 3 * torch.eye(5) + taken
        return PosteriorCovarianceLinearOperator(
            to_linear_operator(test_test.requires_grad_()),
            to_linear_operator(cross.requires_grad_()),
            source=Source(columns),
        )

    def evaluate_linear_op(self, linear_op: PosteriorCovarianceLinearOperator) -> Tensor:
        columns = linear_op.source.projection().basis.to(linear_op.dtype)
        projections = linear_op.test_train.to_dense() @ columns
        return linear_op.test_test.to_dense() - projections @ projections.mT


def in_chunks(covariance: PosteriorCovarianceLinearOperator, points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variances of so many points at a time, from here on."""
    numbers = covariance.source.projection().numbers_per_point(covariance.test_train)
    size = points * numbers * covariance.test_train.batch_shape.numel()
    monkeypatch.setattr("gpy_iterative.exact.prediction.covariance.CHUNK_NUMBERS", size)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
@pytest.mark.parametrize("name", ["matern-3/2", "product", "linear", "batch", "multitask", "sum-in-forward"])
def test_chunks_change_nothing(name: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    posterior = PathwisePosterior(
        case.model, case.likelihood, solver=ConjugateGradients(), exact_below=0, rank=10, num_neighbours=10
    )
    whole = posterior(held_out_points(7)).lazy_covariance_matrix
    assert isinstance(whole, PosteriorCovarianceLinearOperator)
    expected = whole.diagonal()
    in_chunks(whole, chunk_size, monkeypatch)
    torch.testing.assert_close(whole.diagonal(), expected)


def test_chunks_of_a_batch_of_points(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["matern-3/2"]()
    posterior = PathwisePosterior(case.model, case.likelihood)
    whole = posterior(held_out_points(6).reshape(3, 2, 3)).lazy_covariance_matrix
    expected = whole.diagonal()
    in_chunks(whole, 4, monkeypatch)
    torch.testing.assert_close(whole.diagonal(), expected)


class Largest(TorchDispatchMode):
    """The largest number of entries of a tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("name", ["matern-3/2", "product"])
def test_variances_need_no_matrix_of_all_points(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million points scaled down: no tensor of one chunk's work is as large as K(x, X)."""
    case = CASES[name]()
    posterior = PathwisePosterior(case.model, case.likelihood, products=KernelProducts(tile_size=16))
    posterior.solves.projection()
    with Largest() as whole:
        expected = posterior(held_out_points(500)).variance
    with Largest() as largest:
        covariance = posterior(held_out_points(500)).lazy_covariance_matrix
        in_chunks(covariance, 20, monkeypatch)
        variance = covariance.diagonal()
    torch.testing.assert_close(variance, expected)
    assert whole.numel >= 500 * 40
    assert largest.numel <= 540 * 3 * 2  # joint inputs; a chunk's tile has 20 * 40 numbers


def test_covariances_need_no_blocks_of_all_points() -> None:
    """The neighbours' blocks and rows are of some points at a time."""
    case = CASES["matern-3/2"]()
    posterior = PathwisePosterior(
        case.model, case.likelihood, solver=ConjugateGradients(), exact_below=0, rank=30, num_neighbours=30
    )
    posterior.solves.projection()
    with Largest() as largest:
        covariance = posterior(held_out_points(200)).covariance_matrix
    assert covariance.shape == (200, 200)
    assert 200 * 200 <= largest.numel < 200 * 30 * 30


@pytest.mark.parametrize("exact_below", [0, 3000], ids=["projected", "exact"])
def test_points_in_batches_do_not_repeat_a_batch_of_models(exact_below: int) -> None:
    """As BoTorch's acquisition functions ask models of several outputs."""
    x, y = torch.rand(2, 50, 3, dtype=torch.float64), torch.rand(2, 50, dtype=torch.float64)
    kernel = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))
    model = Regression(x, y, GaussianLikelihood(batch_shape=torch.Size([2])), kernel, (2,)).double()
    posterior = PathwisePosterior(model, model.likelihood, exact_below=exact_below, num_neighbours=2)
    points = torch.rand(4, 5, 1, 3, dtype=torch.float64)
    expected = posterior(points.reshape(20, 3)).variance
    with Largest() as largest:
        variance = posterior(points.unsqueeze(-3).expand(4, 5, 2, 1, 3)).variance
        covariance = posterior(points.unsqueeze(-3).expand(4, 5, 2, 1, 3)).covariance_matrix
    torch.testing.assert_close(variance.squeeze(-1), expected.T.view(4, 5, 2))
    torch.testing.assert_close(covariance.squeeze((-1, -2)), expected.T.view(4, 5, 2))
    assert largest.numel < 20 * 2 * 50 * 50


def test_leading_points_stay_lazy() -> None:
    case = CASES["matern-3/2"]()
    whole = PathwisePosterior(case.model, case.likelihood)(held_out_points(7)).lazy_covariance_matrix
    part = whole[..., 2:5, 2:5]
    assert isinstance(part, PosteriorCovarianceLinearOperator)
    torch.testing.assert_close(part.to_dense(), whole.to_dense()[2:5, 2:5])
    torch.testing.assert_close(whole[..., 1:3, 4:].to_dense(), whole.to_dense()[1:3, 4:])
    index = torch.tensor([5, 0, 2])
    torch.testing.assert_close(whole[..., index, :].to_dense(), whole.to_dense()[index])


def test_blocks_are_matrix_free() -> None:
    """What the covariance holds costs O(n + t), whatever is asked of it later."""
    case = CASES["matern-3/2"]()
    whole = PathwisePosterior(case.model, case.likelihood)(held_out_points(200)).lazy_covariance_matrix
    assert all(tensor.numel() <= 200 * 3 for tensor in whole.representation())
    assert JointPrior.__dataclass_fields__.keys() >= {"test_train", "test_test"}

"""Covariances of predictions: samples and densities are exact at any size, from one evaluation of the matrix."""

import pickle
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import LinearOperator
from linear_operator.operators import DiagLinearOperator, LowRankRootAddedDiagLinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.exact.prediction.covariance import PosteriorCovarianceLinearOperator
from gpy_iterative.linear_operators.predicted import (
    CovarianceSumLinearOperator,
    DenseOnRequestLinearOperator,
    RootCovarianceLinearOperator,
    RootPlusDiagonalLinearOperator,
)
from tests.exact.gaussian_models import CASES, Case
from tests.exact.prediction.test_posterior import held_out_points
from tests.features.feature_models import KERNELS, feature_case, fixed_noise_case
from tests.laplace.cases import case as laplace_case
from tests.quadruply.quadruply_models import fourier_problem, gaussian_likelihood


class Evaluated(DenseOnRequestLinearOperator):
    """A given matrix."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.matrix = matrix

    def _size(self) -> torch.Size:
        return self.matrix.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return type(self)(self.matrix.mT)

    def _diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-1, dim2=-2)

    def _evaluated(self) -> Tensor:
        return self.matrix + 0.0


def covariance(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(*shape, 5, 5, generator=generator)
    return root @ root.mT + 3 * torch.eye(5)


class TestSumConforms(LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    should_test_sample = True
    should_call_cg = should_call_lanczos = False

    def create_linear_op(self) -> CovarianceSumLinearOperator:
        return CovarianceSumLinearOperator(
            Evaluated(covariance().requires_grad_()), DiagLinearOperator(torch.arange(1.0, 6.0).requires_grad_())
        )

    def evaluate_linear_op(self, linear_op: CovarianceSumLinearOperator) -> Tensor:
        evaluated, noise = linear_op.linear_ops
        return evaluated.matrix + torch.diag(noise._diag)


class TestBatchOnRequestConforms(LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    should_call_cg = should_call_lanczos = False

    def create_linear_op(self) -> Evaluated:
        return Evaluated(covariance(2).requires_grad_())

    def evaluate_linear_op(self, linear_op: Evaluated) -> Tensor:
        return linear_op.matrix


class TestRootConforms(LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    should_call_lanczos = False
    should_call_lanczos_diagonalization = True

    def create_linear_op(self) -> RootCovarianceLinearOperator:
        return RootCovarianceLinearOperator(torch.linalg.cholesky(covariance()).requires_grad_())

    def evaluate_linear_op(self, linear_op: RootCovarianceLinearOperator) -> Tensor:
        root = linear_op.root.tensor
        return root @ root.mT


class TestRootPlusDiagonalConforms(LinearOperatorTestCase, unittest.TestCase):
    seed = 0
    should_test_sample = True
    should_call_cg = should_call_lanczos = False

    def create_linear_op(self) -> LinearOperator:
        root = RootCovarianceLinearOperator(torch.linalg.cholesky(covariance())[:, :3].clone().requires_grad_())
        noisy = root + DiagLinearOperator(torch.arange(1.0, 6.0).requires_grad_())
        assert isinstance(noisy, RootPlusDiagonalLinearOperator)
        return noisy

    def evaluate_linear_op(self, linear_op: LinearOperator) -> Tensor:
        root, noise = linear_op.linear_ops
        return root.root.tensor @ root.root.tensor.mT + torch.diag(noise._diag)


@contextmanager
def without_dense_methods() -> Iterator[None]:
    """As if there were more than 800 points; GPyTorch's Lanczos root would have rank two."""
    with gpytorch.settings.max_cholesky_size(0), gpytorch.settings.max_root_decomposition_size(2):
        yield


def exact(name: str) -> MultivariateNormal:
    case = CASES[name]()
    return gpi.prediction.PathwisePosterior(case.model, case.likelihood)(held_out_points(6))


def of_model(name: str) -> MultivariateNormal:
    case = CASES[name]()
    gpi.prediction.PathwisePosterior(case.model, case.likelihood).install()
    return case.model(held_out_points(6))


def noisy(case: Case) -> MultivariateNormal:
    posterior = gpi.prediction.PathwisePosterior(case.model, case.likelihood)
    return case.likelihood(posterior(held_out_points(6)))


def of_features(case: Case) -> MultivariateNormal:
    x = case.x[:6] * 0.9 + 0.05
    posterior = gpi.mlls.VariationalFeatureMarginalLogLikelihood(case.likelihood, case.model).posterior()
    return gpytorch.likelihoods.GaussianLikelihood().double()(posterior(x))


def of_quadruply(*, has_noise: bool) -> MultivariateNormal:
    model, x, _ = fourier_problem()
    latent = model.eval()(x[:6])
    return gaussian_likelihood(0.1)(latent) if has_noise else latent


def of_laplace(name: str) -> MultivariateNormal:
    problem = laplace_case(name, n=12)
    return problem.model.eval()(problem.x[:6] + 0.05)


PREDICTIONS: dict[str, Callable[[], MultivariateNormal]] = {
    "exact": lambda: exact("matern-3/2"),
    "exact, batch": lambda: exact("batch"),
    "exact, several outputs": lambda: exact("multitask"),
    "model(x)": lambda: of_model("matern-3/2"),
    "noise": lambda: noisy(CASES["matern-3/2"]()),
    "noise of several outputs": lambda: noisy(CASES["multitask-low-rank-noise"]()),
    "noise, by features": lambda: of_features(feature_case(KERNELS["fourier"]())),
    "noise, by features with jitter": lambda: of_features(fixed_noise_case()),
    "quadruply": lambda: of_quadruply(has_noise=False),
    "quadruply, noise": lambda: of_quadruply(has_noise=True),
    "laplace": lambda: of_laplace("logit"),
    "laplace, several functions": lambda: of_laplace("softmax"),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_many_points_are_sampled_and_judged_by_the_whole_covariance(name: str) -> None:
    found = PREDICTIONS[name]()
    loc, dense = found.loc.detach(), found.covariance_matrix.detach()
    with without_dense_methods():
        root = found.lazy_covariance_matrix.root_decomposition().root.to_dense()
        log_prob = found.log_prob(found.mean.detach() + 0.1)
    torch.testing.assert_close(root @ root.mT, dense, rtol=1e-6, atol=1e-7)
    expected = torch.distributions.MultivariateNormal(loc, dense).log_prob(loc + 0.1)
    torch.testing.assert_close(log_prob, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("index", [slice(1, 5), torch.tensor([4, 0, 3])], ids=["slice", "index"])
def test_some_of_the_points(index: slice | Tensor) -> None:
    found = noisy(CASES["matern-3/2"]())
    dense = found.covariance_matrix.detach()[index][:, index]
    with without_dense_methods():
        root = found[index].lazy_covariance_matrix.root_decomposition().root.to_dense()
    torch.testing.assert_close(root @ root.mT, dense)


def test_a_prediction_with_a_graph_is_evaluated_once() -> None:
    """GPyTorch's blocks of `model(x)` depend on hyperparameters that require gradients."""
    case = CASES["matern-3/2"]()
    gpi.prediction.PathwisePosterior(case.model, case.likelihood).install()
    evaluate = PosteriorCovarianceLinearOperator._evaluated
    with (
        patch.object(PosteriorCovarianceLinearOperator, "_evaluated", autospec=True, side_effect=evaluate) as evaluated,
        without_dense_methods(),
    ):
        found = case.likelihood(case.model(held_out_points(6)))
        found.log_prob(found.mean)
        assert evaluated.call_count == 1
        found.rsample()
        assert evaluated.call_count == 2
        with torch.no_grad():
            found = case.likelihood(case.model(held_out_points(6)))
            assert found.covariance_matrix.shape == (6, 6)
            found.log_prob(found.mean)
        assert evaluated.call_count == 4


def test_a_matrix_without_a_graph_does_not_serve_one_with() -> None:
    matrix = covariance().requires_grad_()
    operator = Evaluated(matrix)
    with torch.no_grad():
        operator.to_dense()
        assert operator.to_dense() is operator.to_dense()
    assert operator.to_dense().requires_grad


@pytest.mark.parametrize("has_noise", [False, True])
def test_gradients_after_a_sample_are_those_of_the_whole_covariance(has_noise: bool) -> None:
    """What is kept without a graph must not serve a density with one: score-function gradients take both."""
    case = CASES["matern-3/2"]()
    gpi.prediction.PathwisePosterior(case.model, case.likelihood).install()
    x = held_out_points(6).requires_grad_()

    def gradient(*, after: bool) -> Tensor:
        found = case.likelihood(case.model(x)) if has_noise else case.model(x)
        if after:
            with torch.no_grad():
                found.sample()
                found.log_prob(found.mean)
                found.lazy_covariance_matrix.to_dense()
        return torch.autograd.grad(found.log_prob(found.mean.detach() + 0.1), x)[0]

    torch.testing.assert_close(gradient(after=True), gradient(after=False))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_smooth_function_is_sampled_in_float32(scale: float) -> None:
    """Its covariance is singular to rounding, and its variances lie far below GPyTorch's jitter."""
    x = torch.rand(200, 1, generator=torch.Generator().manual_seed(0))
    close = torch.exp(-0.5 * (x - x.mT).square())
    deviation = scale**0.5 * torch.linspace(1e-3, 1.0, 200)
    matrix = deviation.unsqueeze(-1) * close * deviation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # of the jitter
        root = Evaluated(matrix).root_decomposition().root.to_dense()
    torch.testing.assert_close((root @ root.mT).diagonal() / matrix.diagonal(), torch.ones(200), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["exact", "noise", "noise, by features", "quadruply, noise", "laplace"])
def test_multiples_and_jitter(name: str) -> None:
    found = PREDICTIONS[name]()
    dense = found.covariance_matrix.detach()
    for changed, expected in ((found * 2.0, 4 * dense), (found.add_jitter(0.3), dense + 0.3 * torch.eye(len(dense)))):
        with without_dense_methods():
            root = changed.lazy_covariance_matrix.root_decomposition().root.to_dense()
        torch.testing.assert_close(root @ root.mT, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["exact, batch", "noise, batch"])
def test_repeated_and_added_members(name: str) -> None:
    found = exact("batch") if name == "exact, batch" else noisy(CASES["batch"]())
    matrix, dense = found.lazy_covariance_matrix, found.covariance_matrix.detach()
    for changed, expected in ((matrix.repeat(2, 1, 1, 1), dense.repeat(2, 1, 1, 1)), (matrix.sum(0), dense.sum(0))):
        with without_dense_methods():
            root = changed.root_decomposition().root.to_dense()
            rest = changed.inv_quad_logdet(torch.ones_like(expected[..., :1]), logdet=True)
        torch.testing.assert_close(root @ root.mT, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(rest[0], torch.linalg.inv(expected).sum((-2, -1)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rest[1], torch.logdet(expected), rtol=1e-5, atol=1e-5)


def test_features_and_noise_need_no_dense_matrix() -> None:
    found = of_features(feature_case(KERNELS["fourier"]()))
    value, expected = found.mean + 0.1, found.log_prob(found.mean + 0.1)
    with (
        without_dense_methods(),
        patch.object(LowRankRootAddedDiagLinearOperator, "to_dense", side_effect=AssertionError),
    ):
        torch.testing.assert_close(found.log_prob(value), expected)
        assert found.sample(torch.Size([3])).shape == (3, 6)
        assert found[1:4].sample().shape == (3,)


def test_a_pickle_has_no_matrix() -> None:
    operator = Evaluated(covariance())
    operator.root_decomposition()
    assert pickle.loads(pickle.dumps(operator)).__dict__.keys().isdisjoint({"_dense", "_memoize_cache"})

"""Dense factors against naive inverses of matrices of all latent values."""

import weakref
from dataclasses import replace

import pytest
import torch
from linear_operator import to_linear_operator
from linear_operator.operators import BlockInterleavedLinearOperator
from torch import Tensor

from gpy_iterative.laplace.evidence import exact_evidence
from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR
from gpy_iterative.laplace.newton.dense import ClassInverse, DenseInverse, DenseKernel, JointInverse
from gpy_iterative.linear_operators.extensions import function_blocks
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_solvers.cholesky import CholeskyFactor
from gpy_iterative.solvers import LaplaceCholesky
from tests.laplace.cases import Case, case

CLASSES = [("softmax", "own"), ("softmax", "shared"), ("softmax", "multitask")]
JOINT = [("softmax", "coregionalised"), ("softmax-mixed", "own"), ("softmax-wide", "shared"), ("logit", "own")]


def latents(problem: Case) -> Tensor:
    """[n, C], with probabilities from 1e-9 to almost 1."""
    shape = problem.prior().mean.shape
    return 5 * torch.sin(1.7 * torch.arange(1.0, 1 + shape.numel(), dtype=torch.float64)).view(shape)


def test_float32_entries_stay_float32() -> None:
    """Also those of several functions; entries that can be evaluated anew are float64."""
    kernels = torch.eye(4).expand(2, 4, 4)
    evaluated = LatentPrior(BlockInterleavedLinearOperator(to_linear_operator(kernels)), torch.zeros(4, 2))
    assert LaplaceCholesky().prior_for(evaluated).operator.dtype == torch.float32
    assert LaplaceCholesky().prior_for(case("logit", n=4, dtype=torch.float32).prior()).operator.dtype == torch.float64


@pytest.mark.parametrize("outputscale", [1.0, 1e3])
@pytest.mark.parametrize(("name", "kind"), CLASSES + JOINT)
def test_everything_equals_a_naive_inverse(name: str, kind: str, outputscale: float) -> None:
    problem = case(name, n=14, kind=kind)
    prior = problem.prior()
    if kind != "coregionalised":
        problem.model.covar_module.outputscale = outputscale * problem.model.covar_module.outputscale.detach()
        prior = problem.prior()
    curvature = problem.pointwise().curvature(latents(problem), NO_FLOOR)
    inverse = DenseKernel(prior.operator).inverse(curvature)
    assert isinstance(inverse, ClassInverse if (name, kind) in CLASSES else JointInverse)

    kernel, w = prior.operator.to_dense(), torch.block_diag(*curvature.blocks())
    inner = torch.eye(len(w), dtype=w.dtype) + w @ kernel
    precision = torch.linalg.solve(inner, w)
    posterior = kernel - kernel @ precision @ kernel
    column = torch.cos(torch.arange(float(len(w)), dtype=torch.float64))

    def assert_near(found: Tensor, wanted: Tensor) -> None:
        assert float((found - wanted).abs().max()) < 1e-9 * outputscale * float(wanted.abs().max())

    torch.testing.assert_close(inverse.logdet(), torch.linalg.slogdet(inner)[1], rtol=1e-10, atol=0)
    torch.testing.assert_close(inverse.kernel.matmul(column), kernel @ column)
    assert_near(inverse.matmul(column), precision @ column)
    weights = torch.outer(column, column) - precision / 2
    is_by_class = isinstance(inverse, ClassInverse)
    assert_near(
        inverse.weights(column, column), function_blocks(weights, prior.num_latents) if is_by_class else weights
    )
    points = torch.arange(prior.num_points)
    blocks = posterior.view(*prior.mean.shape, *prior.mean.shape)[points, :, points]
    assert_near(inverse.covariance_blocks(prior), blocks)
    assert inverse.rank == inverse.actions.shape[-1]
    assert_near(inverse.root @ inverse.root.mT, precision)
    assert_near(inverse.image_of_root, kernel @ inverse.actions)
    assert_near(kernel - inverse.image_of_root @ inverse.image_of_root.mT, posterior)


@pytest.mark.parametrize(("name", "kind"), [("softmax-mixed", "own"), ("softmax-wide", "shared")])
def test_the_joint_kernel_takes_no_product(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, same = (case(name, n=14, kind=kind).prior().operator for _ in range(2))
    dense = same.to_dense()  # is kept
    monkeypatch.setattr(type(operator), "_matmul", None)
    assert torch.equal(DenseKernel(operator).joint, (dense + dense.mT) / 2)


@pytest.mark.parametrize("outputscale", [1.0, 1e4, 1e6])
@pytest.mark.parametrize(("name", "kind"), CLASSES)
def test_evidence_by_class_is_that_of_all_latent_values(name: str, kind: str, outputscale: float) -> None:
    problem = case(name, n=25, kind=kind)
    problem.model.covar_module.outputscale = outputscale * problem.model.covar_module.outputscale.detach()
    prior, likelihood = problem.prior(), problem.pointwise()
    solution = LaplaceCholesky().solve(prior, likelihood)
    assert solution.converged
    assert isinstance(solution.inverse, ClassInverse)
    found = exact_evidence(prior, likelihood, solution)
    joint = JointInverse(DenseKernel(prior.operator), solution.curvature)
    wanted = exact_evidence(prior, likelihood, replace(solution, inverse=joint))
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.mean_weights, wanted.mean_weights, rtol=1e-6, atol=1e-8)
    assert found.left.shape == (3, 25, 25)
    kernel = prior.operator.to_dense()  # the gradient by the logarithm of the outputscale
    moved = (found.left * function_blocks(kernel, 3)).sum()
    torch.testing.assert_close(moved, (wanted.left * kernel).sum(), rtol=1e-6, atol=1e-6)


def test_class_probabilities_that_vanish() -> None:
    problem = case("softmax", n=10)
    curvature = problem.pointwise().curvature(400 * latents(problem), NO_FLOOR)
    assert not curvature.blocks().diagonal(dim1=-2, dim2=-1).all()
    prior = problem.prior()
    inverse = DenseKernel(prior.operator).inverse(curvature)
    torch.testing.assert_close(inverse.covariance_blocks(prior), prior.point_blocks())
    assert float(inverse.logdet()) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", ["softmax", "logit", "student"])
def test_steps_share_factors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, factored = case(name, n=40), DenseInverse._factored
    start = LaplaceCholesky().solve(problem.prior(), problem.pointwise()).value
    problem.model.covar_module.outputscale = 1.02 * problem.model.covar_module.outputscale.detach()
    made: list[Tensor] = []
    monkeypatch.setattr(DenseInverse, "_factored", lambda self, matrix: made.append(matrix) or factored(self, matrix))
    solution = LaplaceCholesky().solve(problem.prior(), problem.pointwise(), initial_weights=start)
    assert solution.converged
    assert solution.stationarity < 1e-10
    assert solution.num_outer > 2
    assert len(made) == (2 if name == "softmax" else 1)  # B_c and M, or I + R^T K R


def test_huge_counts_in_single_precision() -> None:
    problem = case("poisson-softplus", n=20, dtype=torch.float32)
    problem.model.covar_module.outputscale = 250.0
    problem.y = 1e7 * problem.y
    prior = problem.prior()
    kernel = prior.operator.to_dense().detach()
    errors = torch.randn(kernel.shape, generator=torch.Generator().manual_seed(0))
    rounded = kernel * (1 + torch.finfo(torch.float32).eps * errors)  # as some processors do
    assert not torch.equal(rounded, rounded.mT)
    prior = replace(prior, operator=to_linear_operator(rounded))
    assert LaplaceCholesky().solve(prior, problem.pointwise()).converged


@pytest.mark.parametrize("name", ["softmax", "logit"])
def test_a_solution_keeps_no_factors_of_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, factored, made = case(name, n=20), DenseInverse._factored, []

    def watched(inverse: DenseInverse, matrix: Tensor) -> CholeskyFactor:
        factor = factored(inverse, matrix)
        made.append(weakref.ref(factor))
        return factor

    monkeypatch.setattr(DenseInverse, "_factored", watched)
    solution = LaplaceCholesky().solve(problem.prior(), problem.pointwise())
    assert solution.converged
    assert made
    assert not any(factor() for factor in made)


@pytest.mark.parametrize("name", ["softmax", "logit"])
def test_factors_asked_for_in_inference_mode_serve_gradients(name: str) -> None:
    problem = case(name, n=8)
    solution = LaplaceCholesky().solve(problem.prior(), problem.pointwise())
    with torch.inference_mode():
        assert float(solution.inverse.root.abs().max()) > 0
    column = torch.ones(len(solution.inverse.root), dtype=torch.float64, requires_grad=True)
    (column @ solution.inverse.root).square().sum().backward()
    assert column.grad is not None
    torch.testing.assert_close(column.grad, 2 * solution.inverse.root @ solution.inverse.root.sum(0))

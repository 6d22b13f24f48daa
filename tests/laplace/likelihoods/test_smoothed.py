"""Averages of likelihoods over normal latent values: the nodes, closed forms, and derivatives of one another."""

import math

import pytest
import torch
from torch import Tensor

from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR, CurvatureFloor
from gpy_iterative.laplace.likelihoods.quadrature import normal_rule
from gpy_iterative.laplace.likelihoods.smoothed import symmetric_roots
from gpy_iterative.likelihoods import SmoothedLikelihood
from tests.laplace.cases import LIKELIHOODS, case


def latents(n: int, count: int) -> Tensor:
    """[n, C], no random numbers."""
    index = torch.arange(1.0, n * count + 1, dtype=torch.float64)
    return (1.5 * torch.cos(1.3 * index)).view(n, count)


def covariances(n: int, count: int, scale: float = 1.0) -> Tensor:
    """[n, C, C], all different, positive definite."""
    root = torch.sin(torch.arange(1.0, n * count**2 + 1, dtype=torch.float64)).view(n, count, count)
    return scale * (root @ root.mT + 0.3 * torch.eye(count, dtype=torch.float64))


@pytest.mark.parametrize("dimension", [1, 2, 3, 10, 40])
def test_nodes_are_exact_for_cubic_polynomials(dimension: int) -> None:
    nodes, weights = normal_rule(dimension)
    assert nodes.shape == (len(weights), dimension)
    assert weights.min() >= 0
    assert weights.sum().item() == pytest.approx(1.0)
    identity = torch.eye(dimension, dtype=torch.float64)
    torch.testing.assert_close((nodes * weights[:, None]).mT @ nodes, identity, rtol=0, atol=1e-12)
    cubes = torch.einsum("s,si,sj,sk->ijk", weights, nodes, nodes, nodes)
    assert cubes.abs().max() < 1e-10
    assert (weights @ nodes).abs().max() < 1e-12


def test_roots_are_symmetric_and_take_rounding_for_zero() -> None:
    blocks = covariances(5, 3)
    roots = symmetric_roots(blocks)
    torch.testing.assert_close(roots @ roots, blocks)
    torch.testing.assert_close(roots, roots.mT)
    assert torch.equal(symmetric_roots(torch.full((2, 1, 1), -1e-17)), torch.zeros(2, 1, 1))
    singular = torch.diag_embed(torch.tensor([[4.0, 0.0, -1e-16]], dtype=torch.float64))
    torch.testing.assert_close(symmetric_roots(singular), torch.diag_embed(torch.tensor([[2.0, 0.0, 0.0]]).double()))


@pytest.mark.parametrize("variance", [0.1, 1.0, 9.0])
def test_counts_with_a_log_link_have_a_closed_form(variance: float) -> None:
    problem = case("poisson-log", n=8)
    f = latents(8, 1)
    found = SmoothedLikelihood(problem.pointwise(), torch.full((8, 1, 1), variance))
    rate = (f[:, 0] + variance / 2).exp()
    torch.testing.assert_close(found.log_prob(f), problem.y * f[:, 0] - rate - torch.lgamma(problem.y + 1))
    torch.testing.assert_close(found.gradient(f)[:, 0], problem.y - rate)
    torch.testing.assert_close(found.curvature(f, NO_FLOOR).blocks()[:, 0, 0], rate)


def test_labels_with_a_probit_link_against_a_fine_grid() -> None:
    problem, f, variance = case("probit", n=8), latents(8, 1), 16.0
    found = SmoothedLikelihood(problem.pointwise(), torch.full((8, 1, 1), variance))
    grid = torch.linspace(-12, 12, 40_001, dtype=torch.float64)
    density = torch.exp(-0.5 * grid.square()) / math.sqrt(2 * math.pi)
    values = torch.special.log_ndtr((2 * problem.y[:, None] - 1) * (f + 4 * grid))
    torch.testing.assert_close(found.log_prob(f), torch.trapezoid(values * density, grid), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_derivatives_are_those_of_the_average(name: str) -> None:
    problem, count = case(name, n=7), LIKELIHOODS[name][2]
    f = latents(7, count).requires_grad_()
    found = SmoothedLikelihood(problem.pointwise(), covariances(7, count, 0.3))
    total = found.log_prob(f).sum()
    (gradient,) = torch.autograd.grad(total, f, create_graph=True)
    torch.testing.assert_close(found.gradient(f), gradient.detach(), rtol=1e-8, atol=1e-9)
    assert found.total(f) == pytest.approx(total.item())
    rows = [
        -torch.autograd.grad(gradient[:, c].sum(), f, retain_graph=True, materialize_grads=True)[0]
        if gradient.requires_grad
        else torch.zeros_like(f)
        for c in range(count)
    ]
    hessian = torch.stack(rows, dim=-2)
    torch.testing.assert_close(found.hessian(f), hessian, rtol=1e-7, atol=1e-8)
    assert not found.hessian(f).requires_grad
    blocks = found.curvature(f, NO_FLOOR).blocks()
    if name == "negative-binomial":
        hessian = hessian.abs()
    if name not in ("student", "beta"):  # whose curvature is the Fisher information
        torch.testing.assert_close(blocks, hessian, rtol=1e-6, atol=1e-8)


def test_information_is_averaged() -> None:
    problem, f = case("beta", n=6), latents(6, 1)
    point, variance = problem.pointwise(), covariances(6, 1)
    nodes, weights = normal_rule(1)
    expected = sum(w * point.fisher(f + variance[:, 0].sqrt() * z) for z, w in zip(nodes, weights, strict=True))
    found = SmoothedLikelihood(point, variance).curvature(f, NO_FLOOR)
    torch.testing.assert_close(found.blocks(), expected.detach())


@pytest.mark.parametrize("name", ["softmax", "softmax-mixed", "softmax-wide"])
def test_classes_do_not_see_what_they_share(name: str) -> None:
    problem, count = case(name, n=9), LIKELIHOODS[name][2]
    found, f = SmoothedLikelihood(problem.pointwise(), covariances(9, count)), latents(9, count)
    whole = found.curvature(f, NO_FLOOR)
    plain = problem.pointwise().curvature(f, NO_FLOOR)
    x = latents(9 * count, 2)
    torch.testing.assert_close(whole.project(x), plain.project(x), rtol=1e-8, atol=1e-9)  # the same range
    torch.testing.assert_close(whole.root(whole.root_t(x)), whole.matmul(x))
    torch.testing.assert_close(whole.matmul(whole.pinv(x)), whole.project(x), rtol=1e-6, atol=1e-8)
    floored = found.curvature(f, CurvatureFloor(0.5))
    assert floored.eigenvalues.min() >= 0.5 * whole.eigenvalues.max() - 1e-12


def test_without_variance_nothing_is_averaged() -> None:
    problem, f = case("softmax", n=6), latents(6, 3)
    found, point = SmoothedLikelihood(problem.pointwise(), torch.zeros(6, 3, 3)), problem.pointwise()
    torch.testing.assert_close(found.log_prob(f), point.log_prob(f))
    torch.testing.assert_close(found.gradient(f), point.gradient(f))
    torch.testing.assert_close(
        found.curvature(f, NO_FLOOR).blocks(),
        point.curvature(f, NO_FLOOR).blocks(),
        rtol=1e-8,
        atol=1e-9,
    )

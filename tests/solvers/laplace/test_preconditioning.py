"""Newton systems preconditioned by a low-rank factor of the prior."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.likelihoods import NO_FLOOR, Curvature
from gpy_iterative.linear_operators import LatentPrior, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial_functions import RBF
from gpy_iterative.preconditioners import (
    AutomaticRank,
    Nystrom,
    PivotedCholesky,
    PreconditionerRecipe,
    RandomlyPivotedCholesky,
)
from gpy_iterative.solvers import LaplaceCholesky, LaplaceNewton
from gpy_iterative.solvers.laplace.preconditioning import LatentFactor, NewtonPreconditioner, latent_factor
from tests.laplace_cases import LIKELIHOODS, case, inputs
from tests.solvers.laplace.test_newton import KINDS


def factored(
    prior: LatentPrior, curvature: Curvature, recipe: PreconditionerRecipe
) -> tuple[LatentFactor, Tensor, Tensor]:
    """A factor by a recipe, itself and W as dense matrices."""
    factor = latent_factor(recipe, prior, curvature, torch.Generator().manual_seed(0))
    q = len(factor.t_matmul(prior.mean.flatten()))
    dense = torch.stack([factor.matmul(column) for column in torch.eye(q, dtype=torch.float64)], dim=-1)
    return factor, dense, torch.block_diag(*curvature.blocks())


@pytest.mark.parametrize(
    ("name", "kind"),
    [*KINDS, ("softmax", "multitask"), ("softmax-mixed", "shared"), ("softmax-mixed", "coregionalised")],
)
def test_inverts_low_rank_plus_noise_within_the_range(name: str, kind: str) -> None:
    problem = case(name, n=12, kind=kind)
    prior = problem.prior()
    curvature = problem.pointwise().curvature(prior.mean + 0.3, "auto", NO_FLOOR)
    factor, dense, w = factored(prior, curvature, PivotedCholesky(rank=4))
    residual = curvature.project(torch.sin(torch.arange(prior.size).double()).unsqueeze(-1))
    found = NewtonPreconditioner.of(factor, curvature).solve((w @ residual).flatten())
    torch.testing.assert_close(curvature.project(found.unsqueeze(-1)).flatten(), found)
    image = dense @ (dense.mT @ found.unsqueeze(-1)) + curvature.pinv(found.unsqueeze(-1))
    torch.testing.assert_close(curvature.project(image), residual, rtol=1e-8, atol=1e-8)
    coefficients = torch.cos(torch.arange(dense.shape[-1]).double())
    torch.testing.assert_close(factor.t_matmul(dense @ coefficients), dense.mT @ (dense @ coefficients))
    torch.testing.assert_close(factor.weighted_gram(curvature), dense.mT @ w @ dense)


@pytest.mark.parametrize("kind", ["own", "shared", "multitask", "coregionalised"])
def test_factor_of_full_rank_is_the_prior(kind: str) -> None:
    problem = case("softmax", n=10, kind=kind)
    prior = problem.prior()
    curvature = problem.pointwise().curvature(prior.mean, "auto", NO_FLOOR)
    _, dense, _ = factored(prior, curvature, PivotedCholesky(rank=30))
    torch.testing.assert_close(dense @ dense.mT, prior.operator.to_dense(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_same_mode_from_fewer_products(name: str) -> None:
    problem = case(name, n=60)
    prior, likelihood = problem.prior(), problem.pointwise()
    exact = LaplaceCholesky().solve(prior, likelihood)
    plain = LaplaceNewton(tolerance=1e-8, max_outer=100).solve(prior, likelihood)
    found = LaplaceNewton(tolerance=1e-8, max_outer=100, preconditioner=RandomlyPivotedCholesky(rank=20)).solve(
        prior, likelihood
    )
    assert found.converged
    torch.testing.assert_close(found.latent, exact.latent, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prior.matmul(found.actions), found.images, rtol=1e-8, atol=1e-9)
    assert found.num_kernel_products < plain.num_kernel_products


@pytest.mark.parametrize("recipe", [Nystrom(rank=15), AutomaticRank(rank=25), PivotedCholesky(rank=15)])
@pytest.mark.parametrize("kind", ["own", "shared", "coregionalised"])
def test_every_recipe_serves(recipe: PreconditionerRecipe, kind: str) -> None:
    problem = case("softmax", n=40, kind=kind)
    prior, likelihood = problem.prior(), problem.pointwise()
    exact = LaplaceCholesky().solve(prior, likelihood)
    found = LaplaceNewton(tolerance=1e-8, preconditioner=recipe).solve(prior, likelihood)
    torch.testing.assert_close(found.latent, exact.latent, rtol=1e-6, atol=1e-6)


def test_exact_factor_needs_one_product_a_newton_step() -> None:
    problem = case("logit", n=30)
    solver = LaplaceNewton(tolerance=1e-6, preconditioner=PivotedCholesky(rank=30))
    found = solver.solve(problem.prior(), problem.pointwise())
    assert found.converged
    assert found.num_kernel_products == found.stats.iterations


def test_small_rank_keeps_the_mode_and_more_actions_shrink_the_variance() -> None:
    problem = case("softmax", n=60, kind="shared")
    prior, likelihood = problem.prior(), problem.pointwise()
    exact = LaplaceCholesky().solve(prior, likelihood)
    solver = LaplaceNewton(tolerance=1e-8, max_rank=5, max_outer=100, preconditioner=PivotedCholesky(rank=10))
    few = solver.solve(prior, likelihood)
    torch.testing.assert_close(few.latent, exact.latent, rtol=1e-6, atol=1e-6)
    many = LaplaceNewton(tolerance=1e-8, preconditioner=PivotedCholesky(rank=10), num_covariance_actions=60).solve(
        prior, likelihood
    )
    known, better, all_ = (solution.image_of_root.square().sum() for solution in (few, many, exact))
    assert known < better <= all_ * (1 + 1e-8)
    assert better > 0.99 * all_


def test_serves_a_model_from_training_to_a_refined_prediction() -> None:
    def predicted(preconditioner: PreconditionerRecipe | None) -> Tensor:
        solver = LaplaceNewton(tolerance=1e-8, num_covariance_actions=60, preconditioner=preconditioner)
        problem = case("softmax", n=40, kind="own", solver=solver, num_refinements=1)
        mll = gpi.mlls.LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=solver, generator=0)
        (-mll(problem.model(problem.x), problem.y)).backward()
        problem.model.eval()
        return problem.model.predict_proba(inputs(7) + 0.05, method="diagonal")

    torch.testing.assert_close(predicted(PivotedCholesky(rank=10)), predicted(None), rtol=1e-4, atol=1e-5)


def test_options_that_do_not_go_together() -> None:
    recipe = PivotedCholesky(rank=5)
    with pytest.raises(ValueError, match="policy='unit'"):
        LaplaceNewton(policy="unit", preconditioner=recipe)
    with pytest.raises(ValueError, match="literal=True"):
        LaplaceNewton(literal=True, preconditioner=recipe)
    with pytest.raises(TypeError, match="preconditioner must be None or"):
        LaplaceNewton(preconditioner="cholesky")  # pyright: ignore[reportArgumentType]


def test_kernel_that_is_not_finite_is_told() -> None:
    problem = case("logit", n=10)
    broken = RadialKernelLinearOperator(
        torch.full((10, 1), torch.nan, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64), function=RBF
    )
    solver = LaplaceNewton(preconditioner=PivotedCholesky(rank=5))
    with pytest.raises(NonFiniteError):
        solver.solve(replace(problem.prior(), operator=broken), problem.pointwise())

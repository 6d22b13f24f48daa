"""Newton systems preconditioned by a low-rank factor of the prior."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.laplace.likelihoods.curvature import BlockCurvature
from gpy_iterative.laplace.likelihoods.pointwise import NO_FLOOR
from gpy_iterative.laplace.newton.preconditioning import (
    LatentFactor,
    NewtonPreconditioner,
    latent_factor,
)
from gpy_iterative.likelihoods import Curvature
from gpy_iterative.linear_operators import RadialKernelLinearOperator
from gpy_iterative.linear_operators.latent import LatentPrior
from gpy_iterative.linear_operators.radial.functions import RBF
from gpy_iterative.preconditioners import (
    Nystrom,
    PivotedCholesky,
    PreconditionerRecipe,
    RandomlyPivotedCholesky,
)
from gpy_iterative.solvers import LaplaceCholesky, LaplaceNewton
from tests.laplace.cases import LIKELIHOODS, case, inputs
from tests.laplace.newton.test_newton import KINDS


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
    curvature = problem.pointwise().curvature(prior.mean + 0.3, NO_FLOOR)
    factor, dense, w = factored(prior, curvature, PivotedCholesky(rank=4))
    residual = curvature.project(torch.sin(torch.arange(prior.size).double()).unsqueeze(-1))
    found = NewtonPreconditioner(factor, curvature).solve((w @ residual).flatten())
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
    curvature = problem.pointwise().curvature(prior.mean, NO_FLOOR)
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
    torch.testing.assert_close(prior.matmul(found.inverse.actions), found.inverse.images, rtol=1e-8, atol=1e-9)
    assert found.num_kernel_products < plain.num_kernel_products


@pytest.mark.parametrize("recipe", [Nystrom(rank=15), PivotedCholesky(rank=15)])
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
    known, better, all_ = (solution.inverse.image_of_root.square().sum() for solution in (few, many, exact))
    assert known < better <= all_ * (1 + 1e-8)
    assert better > 0.99 * all_


def test_covariance_actions_share_products() -> None:
    problem = case("softmax", n=60, kind="shared")
    prior, likelihood = problem.prior(), problem.pointwise()
    solver = LaplaceNewton(tolerance=1e-8, preconditioner=PivotedCholesky(rank=10))
    without = solver.solve(prior, likelihood)
    for count, products in ((4, 4), (19, 10), (25, 9)):  # one, two and three at a time
        found = replace(solver, num_covariance_actions=count).solve(prior, likelihood)
        assert found.inverse.actions.shape[-1] == without.inverse.actions.shape[-1] + count
        assert found.num_kernel_products == without.num_kernel_products + products
    torch.testing.assert_close(
        found.inverse.actions.mT @ found.inverse.actions,
        torch.eye(found.inverse.actions.shape[-1]).double(),
        rtol=0,
        atol=1e-10,
    )


def test_functions_of_low_rank_leave_the_others_theirs() -> None:
    problem = case("softmax", n=30, kind="own", dtype=torch.float32)
    problem.model.covar_module.base_kernel.lengthscale = torch.tensor([1e3, 1.0, 1.0]).view(3, 1, 1)
    prior, likelihood = problem.prior(), problem.pointwise()
    curvature = likelihood.curvature(prior.mean, NO_FLOOR)
    factor = latent_factor(PivotedCholesky(rank=15), prior, curvature, torch.Generator())
    assert len(factor.columns) > 1
    smooth, *rough = factor.columns
    assert (smooth == 0).all(0).sum() > 5
    assert all((columns != 0).any(0).all() for columns in rough)
    assert LaplaceNewton(preconditioner=PivotedCholesky(rank=15)).solve(prior, likelihood).converged


@pytest.mark.parametrize("kind", ["own", "shared", "coregionalised"])
def test_large_outputscales_in_float32(kind: str) -> None:
    problem = case("softmax", n=200, kind=kind, dtype=torch.float32)
    if kind == "coregionalised":
        problem.model.covar_module.task_covar_module.var = torch.full((3,), 1e4)
    else:
        problem.model.covar_module.outputscale = 1e4
    prior, likelihood = problem.prior(), problem.pointwise()
    found = LaplaceNewton(preconditioner=PivotedCholesky(rank=60), max_outer=200).solve(prior, likelihood)
    assert torch.isfinite(found.latent).all()
    assert found.converged


def test_rounding_does_not_break_the_inner_matrix() -> None:
    """The factor's Gram matrix in float32 is indefinite beside the identity: eigenvalues of 1e8 and of zero."""
    columns = torch.ones(1, 3000, 6) * 200 + 1e-3 * torch.sin(torch.arange(18_000.0)).view(1, 3000, 6)
    factor = LatentFactor(columns, 0.0)
    curvature = BlockCurvature(torch.linspace(0.5, 2, 3000).double().unsqueeze(-1))
    inner = factor.weighted_gram(curvature) + torch.eye(6)
    assert torch.linalg.cholesky_ex(inner).info > 0
    preconditioner = NewtonPreconditioner(factor, curvature)
    residual = torch.cos(torch.arange(3000.0)).double()
    assert residual @ preconditioner.solve(curvature.eigenvalues.squeeze(-1) * residual) > 0


def test_serves_a_model_from_training_to_a_refined_prediction() -> None:
    def trained(solver: LaplaceNewton | None) -> tuple[list[Tensor], Tensor]:
        problem = case("softmax", n=40, kind="own", solver=solver, num_refinements=1)
        mll = gpi.mlls.LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, solver=solver, generator=0)
        (-mll(problem.model(problem.x), problem.y)).backward()
        problem.model.eval()
        gradients = [parameter.grad for parameter in problem.model.parameters() if parameter.grad is not None]
        return gradients, problem.model.predict_proba(inputs(7) + 0.05, method="diagonal")

    # All directions that a softmax sees, so that nothing is left to chance.
    options = {"tolerance": 1e-8, "num_covariance_actions": 80}
    gradients, probabilities = trained(LaplaceNewton(preconditioner=PivotedCholesky(rank=10), **options))
    exact_gradients, exact_probabilities = trained(None)
    assert len(gradients) == len(exact_gradients) > 2
    for found, exact in zip(gradients, exact_gradients, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(probabilities, exact_probabilities, rtol=1e-4, atol=1e-5)


def test_preconditioners_are_recipes() -> None:
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

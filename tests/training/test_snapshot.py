"""Predictions come from a model in evaluation mode, whatever mode the user's is in, and leave it there."""

from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.prediction import LaplacePosterior, PathwisePosterior
from gpy_iterative.solvers import Cholesky, ConjugateGradients
from gpy_iterative.training.snapshot import ModelSnapshot
from tests.exact.gaussian_models import CASES, Case, regression
from tests.exact.prediction.test_posterior import dense, held_out_points


class TwiceAsLargeInTraining(kernels.RBFKernel):
    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **options: object) -> Tensor:
        return (2.0 if self.training else 1.0) * super().forward(x1, x2, diag=diag, **options)


class WithDropout(kernels.RBFKernel):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
        self.held = [torch.nn.Dropout(0.5)]

    def forward(self, x1: Tensor, x2: Tensor, **options: object) -> Tensor:
        return super().forward(self.network(x1), self.network(x2), **options)


def in_training(case: Case) -> Case:
    case.model.train()
    case.likelihood.train()
    return case


@pytest.mark.parametrize("solver", [Cholesky(), ConjugateGradients(tolerance=1e-10)])
@pytest.mark.parametrize("kernel", [TwiceAsLargeInTraining, WithDropout])
def test_a_posterior_that_is_made_in_training_mode(
    kernel: type[kernels.Kernel], solver: Cholesky | ConjugateGradients
) -> None:
    """Kernels are evaluated when they are asked for, which may be after the mode has changed back."""
    case, x = in_training(regression(kernel())), held_out_points()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=solver)
    posterior = PathwisePosterior(case.model, case.likelihood, solver=solver, exact_below=0, rank=100)
    prediction = posterior(x)
    assert all(module.training for root in (case.model, case.likelihood) for module in root.modules())
    installed = mll.posterior()(x)
    mean, covariance = dense(case, x)
    for found in (prediction, installed):
        torch.testing.assert_close(found.mean, mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.covariance_matrix, covariance, rtol=0, atol=1e-6)


def test_a_mode_is_found_in_evaluation_mode() -> None:
    class Classifier(gpi.models.IterativeLaplaceGP):
        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(x.new_zeros(len(x)), self.kernel(x))

    case = CASES["rbf"]()
    predictions = []
    for mode in (True, False):
        model = Classifier(case.x, (case.y > 0).long(), gpi.likelihoods.LogitBernoulliLikelihood())
        model.kernel = TwiceAsLargeInTraining()
        model.double().train(mode)
        posterior = LaplacePosterior(model, model.likelihood)
        predictions.append(posterior(held_out_points()))
        assert model.training == mode
    torch.testing.assert_close(predictions[0].mean, predictions[1].mean)
    torch.testing.assert_close(predictions[0].covariance_matrix, predictions[1].covariance_matrix)


@pytest.mark.parametrize("factor", [lambda: kernels.ConstantKernel(), None])
def test_frequencies_of_the_first_call_are_the_models(factor: Callable[[], kernels.Kernel] | None) -> None:
    """RFFKernel draws them when it knows the inputs: the posterior's are the model's from then on."""
    kernel = kernels.RFFKernel(num_samples=20)
    case = regression(kernel if factor is None else kernel * factor())
    posterior = PathwisePosterior(case.model, case.likelihood, solver=Cholesky())
    solves, mean = posterior.solves, posterior(held_out_points()).mean
    assert kernel.randn_weights.shape == (3, 20)
    torch.testing.assert_close(mean, dense(case, held_out_points())[0])
    assert posterior.solves is solves


def test_a_snapshot_holds_no_posterior() -> None:
    """One posterior after the other would stay in memory, each held by the model that the next was made of."""
    case = CASES["rbf"]()
    PathwisePosterior(case.model, case.likelihood).install()
    assert ModelSnapshot.of(case.model, case.likelihood).model.prediction_strategy is None
    model = gpi.models.IterativeLaplaceGP(case.x, case.y, case.likelihood)
    model._posterior = object()
    assert ModelSnapshot.of(model, case.likelihood).model._posterior is None


def test_expanded_inputs_are_not_written_out() -> None:
    case = CASES["rbf"]()
    case.model.set_train_data(case.x.expand(50, *case.x.shape), case.y.expand(50, -1), strict=False)
    snapshot = ModelSnapshot.of(case.model, case.likelihood)
    assert snapshot.model.train_inputs[0].untyped_storage().nbytes() == case.x.untyped_storage().nbytes()
    assert snapshot.describes(case.model, case.likelihood)

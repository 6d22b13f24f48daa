"""The protocol of posteriors."""

import torch
from gpytorch import kernels

from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import ConjugateGradients, SolveStatus
from gpy_iterative.training.posterior import Posterior
from tests.exact.gaussian_models import regression


def test_a_pathwise_posterior_is_one_and_reports_its_solve() -> None:
    case = regression(kernels.RBFKernel(), n=20)
    factored = PathwisePosterior(case.model, case.likelihood)
    solved = PathwisePosterior(case.model, case.likelihood, solver=ConjugateGradients(tolerance=1e-6))
    assert isinstance(factored, Posterior)
    assert factored.report.epochs == 0
    assert solved.report.status is SolveStatus.CONVERGED
    assert solved.report.residual <= 1e-6
    assert 0 < solved.report.iterations <= 60
    assert "epochs" in solved.report.table()
    case.likelihood.noise = torch.tensor(0.5)
    before = solved.report.seconds
    assert solved.report.seconds == before  # the solve at the hyperparameters of now, once

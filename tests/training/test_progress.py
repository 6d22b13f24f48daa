"""Who asks is told how far a long operation is; who does not is not."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.exact.prediction import covariance
from gpy_iterative.features.weight_space.posterior import WeightSpacePosterior
from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.solvers import ConjugateGradients, LaplaceNewton
from gpy_iterative.training.progress import Progress, ProgressReport, reporting
from tests.exact.gaussian_models import Case, regression
from tests.exact.prediction.test_posterior import held_out_points
from tests.features.feature_models import feature_case, fourier
from tests.laplace.cases import case as laplace_case

CG = ConjugateGradients(tolerance=1e-6)


def _case() -> Case:
    return regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)))


def _hutchinson(progress: Progress) -> None:
    case = _case()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, solver=CG, generator=0, progress=progress
    )
    mll(case.model(case.x), case.y)


def _mean(progress: Progress) -> None:
    case = _case()
    PathwisePosterior(case.model, case.likelihood, solver=CG, progress=progress)


def _mode(progress: Progress) -> None:
    problem = laplace_case("logit")
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(
        problem.likelihood, problem.model, solver=LaplaceNewton(), generator=0, progress=progress
    )
    mll(problem.model(problem.x), problem.y)


def _mode_for_predictions(progress: Progress) -> None:
    problem = laplace_case("logit")
    problem.model.eval()
    problem.model.posterior(solver=LaplaceNewton(), progress=progress)


def _subsets(progress: Progress) -> None:
    case = _case()
    options = {"subset_size": 10, "num_subsets": 3}
    gpi.initialize_from_subsets(case.model, case.likelihood, progress=progress, **options)


def _passes(progress: Progress) -> None:
    case = feature_case(kernels.ScaleKernel(fourier()))
    mll = gpi.mlls.VariationalFeatureMarginalLogLikelihood(case.likelihood, case.model)
    mll.progress = progress
    mll.refresh()
    mll(case.model(case.x), case.y)


OPERATIONS: dict[str, tuple[Callable[[Progress], None], str, str]] = {
    "hutchinson": (_hutchinson, "solve", "epochs"),
    "mean": (_mean, "solve", "epochs"),
    "mode": (_mode, "mode", "products"),
    "mode-for-predictions": (_mode_for_predictions, "mode", "products"),
    "subsets": (_subsets, "subsets", "subsets"),
    "passes": (_passes, "pass", "rows"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_told(name: str) -> None:
    run, operation, unit = OPERATIONS[name]
    told: list[ProgressReport] = []
    run(told.append)
    assert told
    assert {(report.operation, report.unit) for report in told} == {(operation, unit)}
    assert [report.done for report in told] == sorted(report.done for report in told)
    assert told[-1].figures or told[-1].done == told[-1].total


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shown", [True, False])
def test_shown(name: str, shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run, operation, _ = OPERATIONS[name]
    run(shown)
    output = capsys.readouterr()
    assert (f"{operation}: " in output.err) is shown
    assert output.out == ""


def test_nothing_is_shown_without_a_stream_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs without a console, such as those of pythonw, have none."""
    monkeypatch.setattr(sys, "stderr", None)
    with reporting(True, "fit", "steps", 3) as tell:
        tell(2, {"value": 0.5})


def test_a_count_is_told_with_its_total() -> None:
    told: list[ProgressReport] = []
    with reporting(told.append, "subsets", "subsets", 7) as tell:
        tell(2, {"loss": 0.5})
    assert told == [ProgressReport("subsets", 2, "subsets", 7, {"loss": 0.5})]


def test_every_later_solve_and_chunk_of_a_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariance, "CHUNK_NUMBERS", 1)
    case, told = _case(), list[ProgressReport]()
    options = {"exact_below": 0, "rank": 5, "num_neighbours": 3, "num_frequencies": 20}
    posterior = PathwisePosterior(case.model, case.likelihood, solver=CG, progress=told.append, **options)
    told.clear()
    _ = posterior(held_out_points(4)).variance
    assert [(report.operation, report.done, report.total) for report in told] == [
        ("variances", done, 4) for done in (1, 2, 3, 4)
    ]
    told.clear()
    posterior.sample_paths(2)
    assert {report.operation for report in told} == {"solve"}
    told.clear()
    case.model.covar_module.initialize(outputscale=3.0)
    posterior.refresh()
    assert {report.operation for report in told} == {"solve"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_logs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Under the package's name, below the level that Python shows by itself."""
    with caplog.at_level(logging.DEBUG, logger="gpy_iterative"):
        OPERATIONS[name][0](False)
    assert caplog.records
    for record in caplog.records:
        assert record.name.startswith("gpy_iterative.")
        assert record.levelno < logging.WARNING
        assert record.getMessage()


def test_nothing_is_configured() -> None:
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "gpy_iterative"]
    assert names
    for name in names:
        logger = logging.getLogger(name)
        assert not logger.handlers
        assert logger.level == logging.NOTSET
        assert logger.propagate


def test_the_callback_does_not_change_a_run() -> None:
    values = []
    for progress in (False, lambda report: None):
        case = _case()
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
            case.likelihood, case.model, solver=CG, generator=0, progress=progress
        )
        values.append(mll(case.model(case.x), case.y).detach())
    assert torch.equal(*values)


def _features(progress: Progress) -> None:
    case = feature_case(kernels.ScaleKernel(fourier()))
    WeightSpacePosterior(case.model, case.likelihood, progress=progress)


@pytest.mark.parametrize("wrong", [1, None, "yes"])
@pytest.mark.parametrize("operation", [_hutchinson, _mean, _mode, _mode_for_predictions, _subsets, _features])
def test_what_is_neither_a_flag_nor_a_callable(operation: Callable[[Any], None], wrong: Any) -> None:
    with pytest.raises(TypeError, match="progress must be True, False or a callable"):
        operation(wrong)

"""Reports as a line, a table, and what a notebook shows."""

import re
from dataclasses import replace

import pytest
import torch
from gpytorch import kernels

from gpy_iterative.features.base import MinibatchReport
from gpy_iterative.prediction import PathwisePosterior
from gpy_iterative.randomized.series import TruncationReport
from gpy_iterative.solvers import ConjugateGradients, SolveStatus
from gpy_iterative.training.report import MarginalLogLikelihoodReport
from gpy_iterative.truncation import ExponentialTruncation
from tests.exact.gaussian_models import regression
from tests.exact.test_resume import RUNS

REPORT = MarginalLogLikelihoodReport(
    status=SolveStatus.BUDGET_EXHAUSTED,
    iterations=12,
    epochs=11.5,
    residual_targets=0.0123456,
    residual_probes=None,
    value=torch.tensor(-1.25),
    value_sem=torch.tensor([0.5, 0.25]),
    seconds=0.031,
)


def test_table() -> None:
    assert REPORT.table().splitlines() == [
        "status            budget exhausted",
        "iterations        12",
        "epochs            11.5",
        "residual targets  0.01235",
        "value             -1.25",
        "value sem         0.5, 0.25",
        "seconds           0.031",
    ]


def test_line() -> None:
    assert str(REPORT) == "mll -1.2500 ± 0.4; budget_exhausted after 11.5 epochs; residuals: targets 0.012; 0.03 s"
    assert "mll -1.2500 error unknown;" in str(replace(REPORT, value_sem=torch.tensor(torch.nan)))


def test_notebook() -> None:
    shown = REPORT._repr_html_()
    cells = re.findall("<tr><th>(.*?)</th><td>(.*?)</td></tr>", shown)
    assert shown == f"<table>{''.join(f'<tr><th>{name}</th><td>{figure}</td></tr>' for name, figure in cells)}</table>"
    assert [f"{name:<16}  {figure}" for name, figure in cells] == REPORT.table().splitlines()


def test_many_figures_and_reports_inside() -> None:
    report = MarginalLogLikelihoodReport(
        **{
            **vars(REPORT),
            "truncation": TruncationReport(
                ExponentialTruncation(10, 0.1),
                target_steps=torch.arange(1, 9),
                probe_steps=torch.tensor([3]),
                steps=torch.tensor([3, 4]),
                converged=torch.tensor([True, False]),
                relative_variance=torch.tensor(0.5),
                decay_rate=torch.tensor(0.1),
            ),
        }
    )
    table = report.table()
    assert re.search("target steps +1 to 8, mean 4.5 \\(8 figures\\)", table)
    assert re.search("probe steps +3\n", table)
    assert "ExponentialTruncation(" in table


def test_markup_is_escaped() -> None:
    report = MinibatchReport(value=torch.tensor(1.0), batch_size="<b>", num_data=3, steps=2, seconds=0.1)  # type: ignore
    assert "&lt;b&gt;" in report._repr_html_()


@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.ApproximationWarning")
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
@pytest.mark.parametrize("name", ["hutchinson-batch", "roulette", "rff", "laplace", "quadruply", "features-natural"])
def test_reports_of_runs(name: str) -> None:
    run = RUNS[name](0)
    run.train(1)
    report = run.mll.report
    assert "\n" not in str(report)
    assert re.search("^value +[-0-9]", report.table(), re.MULTILINE)
    assert "<th>value</th>" in report._repr_html_()


def test_a_pathwise_posterior_reports_its_solve() -> None:
    case = regression(kernels.RBFKernel(), n=20)
    factored = PathwisePosterior(case.model, case.likelihood)
    solved = PathwisePosterior(case.model, case.likelihood, solver=ConjugateGradients(tolerance=1e-6))
    assert factored.report.epochs == 0
    assert solved.report.status is SolveStatus.CONVERGED
    assert solved.report.residual <= 1e-6
    assert 0 < solved.report.iterations <= 60
    assert "epochs" in solved.report.table()
    assert re.match(r"status converged, iterations \d+, epochs", str(solved.report))
    case.likelihood.noise = torch.tensor(0.5)
    before = solved.report.seconds
    assert solved.report.seconds == before  # the solve at the hyperparameters of now, once

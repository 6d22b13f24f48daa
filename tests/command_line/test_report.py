"""The words of the report, from results whose numbers are known."""

import math
import re
from dataclasses import replace

import pytest
import torch

from gpy_iterative.command_line.columns import Column
from gpy_iterative.command_line.model import TableModel
from gpy_iterative.command_line.report import fit_lines, score_lines
from gpy_iterative.fitting import Estimated, FitResult, FitStatus, HistoryRow

COLUMNS = (Column("area", "number"), Column("luck", "number"), Column("street", "category", ("Ash", "Elm", "Oak")))
LENGTHSCALE = "model.covar_module.base_kernel.lengthscale"


@pytest.fixture
def model() -> TableModel:
    """Of a target with mean 100 and deviation 10, and an area with deviation 50."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    x[:, 0] *= 50 / x[:, 0].std(correction=0)
    y = torch.tensor([90.0, 110.0] * 10, dtype=torch.float64)
    return TableModel.of(COLUMNS, "price", x, y, torch.float64)


def known(name: str, value: float, error: float) -> Estimated:
    return Estimated(name, value, error, value * math.exp(-1.96 * error), value * math.exp(1.96 * error))


RESULT = FitResult(
    status=FitStatus.CONVERGED,
    steps=7,
    history=(HistoryRow(0, -1.0, 0.0, 0.01, 0.0, 0.0, 1.0, 0.5),),
    hyperparameters=(
        Estimated("likelihood.noise_covar.noise", 1e-4, None, None, None, at_bound=True),
        Estimated("model.mean_module.constant", 0.2, 0.1, 0.004, 0.396),
        known("model.covar_module.outputscale", 4.0, 0.2),
        known(f"{LENGTHSCALE}[0]", 2.0, 0.1),
        Estimated(f"{LENGTHSCALE}[1]", 50.0, None, None, None),
        *(Estimated(f"{LENGTHSCALE}[{index}]", 0.01, None, None, None) for index in (2, 3, 4)),
    ),
    irrelevant=tuple(f"{LENGTHSCALE}[{index}]" for index in (1, 2, 3, 4)),
    method="average_information",
    reason="few hyperparameters",
    seconds=1.5,
)


@pytest.mark.parametrize("status", list(FitStatus))
def test_advice_names_options_of_the_command(status: FitStatus, model: TableModel) -> None:
    first = fit_lines(model, replace(RESULT, status=status))[0]
    assert set(re.findall(r"--[a-z-]+", first)) <= {"--double", "--max-steps", "--checkpoint"}
    assert not re.search(r"num_probes|=|mll|constraint|batches", first)


def test_hyperparameters_are_in_the_units_of_the_table(model: TableModel) -> None:
    lines = fit_lines(model, RESULT)
    assert lines[0] == f"CONVERGED, 7 steps, 1.5 s: {FitStatus.CONVERGED.advice}"
    assert lines[2] == "  noise of price (standard deviation): 0.1, held at its bound"
    assert lines[3] == "  mean of price far from the data: 102, standard error 1 (95 % interval 100.04 to 103.96)"
    variation = "20, standard error a factor of 1.105 (95 % interval 16.44 to 24.33)"  # of its square: exp(.2)
    assert lines[4] == f"  variation of price around it (standard deviation): {variation}"
    assert lines[5] == "  lengthscale of area: 100, standard error a factor of 1.105 (95 % interval 82.2 to 121.7)"
    assert lines[6].endswith(", not determined by the data")
    assert lines[7].startswith("  lengthscale of street=Ash: ")


def test_a_lengthscale_of_dates_is_in_days(model: TableModel) -> None:
    lines = fit_lines(replace(model, columns=(Column("built", "date"), *COLUMNS[1:])), RESULT)
    assert lines[5].startswith("  lengthscale of built (days): 100, ")
    assert lines[6].startswith("  lengthscale of luck: ")


def test_a_short_lengthscale_is_not_called_useless(model: TableModel) -> None:
    assert fit_lines(model, RESULT)[-1] == "The data may do without these inputs: luck."
    long = tuple(
        replace(each, value=50.0) if each.name in RESULT.irrelevant[1:] else each for each in RESULT.hyperparameters
    )
    assert (
        fit_lines(model, replace(RESULT, hyperparameters=long))[-1]
        == "The data may do without these inputs: luck, street."
    )
    some = replace(RESULT, hyperparameters=long, irrelevant=RESULT.irrelevant[:3])  # two levels of street
    assert fit_lines(model, some)[-1] == "The data may do without these inputs: luck."


def test_a_fit_by_adam_or_an_interrupted_one_claims_no_errors(model: TableModel) -> None:
    without = tuple(
        replace(each, low=None, high=None, standard_error=None, at_bound=False) for each in RESULT.hyperparameters
    )
    lines = fit_lines(
        model, replace(RESULT, hyperparameters=without, irrelevant=(), method="adam", reason="61 of them.")
    )
    assert lines[1] == "Trained by Adam, without standard errors: 61 of them."
    assert lines[6] == "  lengthscale of area: 100"
    interrupted = replace(RESULT, hyperparameters=without, irrelevant=(), status=FitStatus.BUDGET)
    assert fit_lines(model, interrupted)[5] == "  lengthscale of area: 100"


def test_scores_are_those_of_the_normals(model: TableModel) -> None:
    y, mean, deviation = (
        torch.tensor(values, dtype=torch.float64) for values in ([100.0, 104], [101.0, 101], [1.0, 1])
    )
    rmse, plain_rmse = math.sqrt(5), math.sqrt(8)
    normal = math.log(2 * math.pi) / 2
    density, plain_density = -normal - 2.5, -normal - math.log(10) - 0.04
    assert score_lines(model, y, mean, deviation)[1:] == [
        f"  root mean square error: {rmse:.4g} ({plain_rmse:.4g})",
        f"  mean log density: {density:.4g} ({plain_density:.4g})",
        "  inside their 95 % intervals: 50.0%, 1 of 2 rows",
    ]

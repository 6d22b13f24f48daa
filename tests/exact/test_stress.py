"""No run dies, whatever kernel, inputs, dtype, solver and estimator, and gradients are as near to exact as they say."""

import itertools

import pytest

from tests.exact.stress import FACTORS, Run, design, is_possible, problems_of

#: Of every run of the tests: each level once, few data and steps. `make stress` trains all pairs for thirty steps.
SMALL = FACTORS | {"size": (150,)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--stress")
        runs = design(FACTORS, 2) if whole else design(SMALL, 1)
        metafunc.parametrize("run", list(runs), ids=str)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_runs(run: Run, pytestconfig: pytest.Config) -> None:
    options = {} if pytestconfig.getoption("--stress") else {"steps": 2, "draws": 3}
    assert not problems_of(run, **options)


def test_the_design_has_all_pairs() -> None:
    runs = list(design(FACTORS, 2))
    assert len(runs) < 150
    for (first, a_levels), (second, b_levels) in itertools.combinations(FACTORS.items(), 2):
        wanted = {(a, b) for a, b in itertools.product(a_levels, b_levels) if is_possible({first: a, second: b})}
        assert {(getattr(run, first), getattr(run, second)) for run in runs} == wanted

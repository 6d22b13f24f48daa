"""The comparison of preconditioners, on a few synthetic rows."""

import pytest

from benchmarks.cases import preconditioners
from benchmarks.datasets import Split
from tests.oracles import problem


def test_every_preconditioner_gives_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *, rows: int | None) -> Split:
        x, _, y = problem(rows)
        return Split(name, x, y, x[:1], y[:1])

    monkeypatch.setattr(preconditioners, "load", load)
    found = preconditioners.evaluations("some", 60, 300)
    assert list(found) == list(preconditioners.RECIPES)
    exact = found["Vecchia"]
    for outcome in found.values():
        assert outcome["status"] == "CONVERGED"
        assert outcome["rows"] == 60
        error = abs(outcome["value"] - exact["value"])
        assert error <= 4 * (outcome["value_sem"] + exact["value_sem"]) + 1e-3


def test_what_does_not_converge_is_shown() -> None:
    outcome = {"status": "BUDGET_EXHAUSTED", "iterations": 300, "seconds": 2.34, "value_sem": 0.12345}
    assert preconditioners.shown(outcome) == "more than 300 iterations, 2.3 s, 0.1235"
    assert preconditioners.shown(outcome | {"status": "CONVERGED"}) == "300 iterations, 2.3 s, 0.1235"

"""The errors of gradient and value on a small field."""

import pytest

from benchmarks.cases import spatial_gradient


def test_exact_sizes_have_no_error() -> None:
    found = spatial_gradient.errors(300, 2, 1)
    assert list(found) == list(spatial_gradient.hyperparameters(2))
    for outcome in found.values():
        assert max(outcome["gradient"]) < 1e-3  # float32 data
        assert abs(outcome["value"][0]) < 0.01
        assert outcome["value_sem"] == 0


def test_figures_of_the_table() -> None:
    outcome = {"norm": 1234.5, "gradient": [0.003, 0.004], "value": [3.0, -4.0], "value_sem": 2.55, "seconds": 1.23}
    shown = spatial_gradient.shown(outcome)
    assert shown == ["1.23e+03", "0.35 %", "0.40 %", "3.5", "2.5", "1.2"]
    assert float(shown[4]) == pytest.approx(2.5)

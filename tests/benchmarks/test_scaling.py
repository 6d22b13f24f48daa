"""What the scaling benchmark counts."""

from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.cases import scaling
from benchmarks.command_line import app
from tests.processes import Processes

N, D, S = 700, 3, 5


def measured(group: Any) -> dict[str, Any]:
    return scaling.measured_products(group, N, D, S, repeats=2)


@pytest.mark.slow
def test_a_product_communicates_its_result_once(processes: Processes) -> None:
    """Two numbers a rank go ahead of it; the derivative's two sums of values are float64."""
    for size in (2, 3):
        for found in processes.run(measured, size=size):
            for name in ("product", "product, kept tiles"):
                assert found[name]["messages"] == 2
                assert found[name]["bytes"] == 4 * N * S + 8 * 2 * size
                assert len(found[name]["seconds"]) == 2
            assert found["derivative"]["messages"] == 3
            assert found["derivative"]["bytes"] == 4 * N * D + 8 * (2 + 2 * size)
    assert measured(None)["product"]["bytes"] == 0


def test_numbers_of_processes_are_listed_after_one_option(monkeypatch: Any) -> None:
    asked: list[int] = []

    def compare(case: str, names: list[str], **options: Any) -> dict[str, Any]:
        asked.append(options["processes"])
        return {names[0]: {"error": ["not run"]}}

    monkeypatch.setattr(scaling, "run_contenders", compare)
    monkeypatch.setattr(scaling, "finish", lambda *_, **__: None)
    for arguments in (["--processes", "1", "3"], []):
        assert CliRunner().invoke(app, ["scaling", *arguments]).exit_code == 0
    assert asked == [1, 3, 1, 2]

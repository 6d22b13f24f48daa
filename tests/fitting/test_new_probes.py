"""Probes that are drawn again before noise ends a fit."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gpy_iterative as gpi
from gpy_iterative.fitting.steps import average_information
from tests.fitting.problems import LOW_RANK, quiet, regression


@pytest.mark.parametrize(("less", "is_taken"), [(math.inf, True), (0.0, False)])
def test_new_probes_are_taken_if_they_lower_the_noise(
    less: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(average_information, "LESS_NOISE", less)
    optimiser = gpi.fitting.AverageInformation(regression(100, solver=LOW_RANK, probes="rademacher"))
    optimiser.step()
    point, state = optimiser.point, optimiser.mll.training_state()
    assert optimiser.assess().noise > 0
    assert optimiser.redraw_probes() is is_taken
    assert (optimiser.point is not point) is is_taken
    torch.testing.assert_close(optimiser.point.position, point.position)
    now = optimiser.mll.training_state()
    assert all(torch.equal(now[name], tensor) for name, tensor in state.items()) is not is_taken
    assert optimiser.step() is not None


@pytest.mark.parametrize(("less", "steps"), [(math.inf, [0, 1, 1, 2]), (0.0, [0, 1])])
def test_a_fit_tries_new_probes_once_before_noise_ends_it(
    less: float, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes and preconditioner of a smooth start had eighty times the noise at the end."""
    monkeypatch.setattr(average_information, "LESS_NOISE", less)
    monkeypatch.setattr("gpy_iterative.fitting.loops.is_drowned", lambda lefts, *_: len(lefts) == 2)
    make = partial(regression, 100, solver=LOW_RANK, probes="rademacher")
    mll = make()
    assert [row.step for row in quiet(mll).history] == steps
    for number in range(2, len(steps)):
        resumed, rows = make(), []

        def interrupt(row: gpi.fitting.HistoryRow, number: int = number, rows: list[Any] = rows) -> None:
            rows.append(row)
            if len(rows) == number:
                raise KeyboardInterrupt

        path = tmp_path / f"{number}.pt"
        assert quiet(resumed, checkpoint=path, callback=interrupt).is_interrupted
        quiet(resumed, checkpoint=path)
        assert all(torch.equal(*pair) for pair in zip(resumed.parameters(), mll.parameters(), strict=True))

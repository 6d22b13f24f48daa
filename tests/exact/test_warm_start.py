"""Warm starts: what is offered, when nothing is, and to which system they belong."""

from typing import Any

import pytest
import torch
from linear_operator.operators import DiagLinearOperator

from gpy_iterative.exact.estimates import check_warm_start, warm_start_after
from gpy_iterative.training.run import Run

FIRST, SECOND = torch.ones(4, 3).double(), 3 * torch.ones(4, 3).double()
SYSTEM = DiagLinearOperator(torch.ones(4).double())


def _after(mode: Any, *solutions: torch.Tensor) -> Any:
    part = None
    for each in solutions:
        part = warm_start_after(mode, part, each)
    return part


def _guess(part: Any) -> torch.Tensor:
    return part.get("guess", part["latest"])


@pytest.mark.parametrize(("mode", "expected"), [("extrapolated", 5.0), ("previous", 3.0)])
def test_modes(mode: Any, expected: float) -> None:
    check_warm_start(mode)
    assert (_guess(_after(mode, FIRST)) == 1).all()  # two points are needed to extrapolate
    assert (_guess(_after(mode, FIRST, SECOND)) == expected).all()


def test_a_cold_start_keeps_the_last_solution() -> None:
    part = _after(False, FIRST, SECOND)
    assert part == {"latest": SECOND}
    for other in ("sometimes", 0):
        with pytest.raises(ValueError, match=f"got {other!r}"):
            check_warm_start(other)


@pytest.mark.parametrize(
    "operator", [DiagLinearOperator(torch.ones(5).double()), DiagLinearOperator(torch.ones(4)), SYSTEM.expand(2, 4, 4)]
)
def test_nothing_is_kept_for_another_system(operator: Any) -> None:
    run = Run.begin(0).for_system(SYSTEM).having(warm_start=_after("extrapolated", FIRST))
    assert run.for_system(SYSTEM) is run
    assert run.for_system(operator).parts.get("warm_start") is None
    assert torch.equal(run.for_system(operator).position, run.position)


def test_state_resumes_and_moves() -> None:
    run = Run.begin(0).for_system(SYSTEM).having(warm_start=_after("extrapolated", FIRST, SECOND))
    resumed = Run.begin(1).loaded(run.to_dict()).for_system(SYSTEM)
    assert (_guess(resumed.parts["warm_start"]) == 5).all()
    moved = run.mapped(torch.Tensor.float)
    assert moved.for_system(DiagLinearOperator(torch.ones(4))) is moved
    assert _guess(moved.parts["warm_start"]).dtype == torch.float32

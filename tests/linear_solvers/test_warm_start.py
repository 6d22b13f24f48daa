"""Warm starts: what is offered, when nothing is, and how they move and resume."""

import pytest
import torch

from gpy_iterative.solvers import WarmStart

LIKE = torch.zeros(4).double()
FIRST, SECOND = torch.ones(4, 3).double(), 3 * torch.ones(4, 3).double()


def test_modes() -> None:
    for mode, expected in (("extrapolated", 5.0), ("previous", 3.0)):
        start = WarmStart(mode)
        assert start.initial_guess(LIKE, 3) is None
        start.update(FIRST)
        assert (start.initial_guess(LIKE, 3) == 1).all()  # two points are needed to extrapolate
        start.update(SECOND)
        assert (start.initial_guess(LIKE, 3) == expected).all()
    cold = WarmStart(False)
    cold.update(FIRST)
    assert cold.initial_guess(LIKE, 3) is None
    assert cold.latest is FIRST
    with pytest.raises(ValueError, match="sometimes"):
        WarmStart("sometimes")


@pytest.mark.parametrize(("like", "columns"), [(torch.zeros(5).double(), 3), (LIKE, 2), (LIKE.float(), 3)])
def test_nothing_is_offered_that_does_not_fit(like: torch.Tensor, columns: int) -> None:
    start = WarmStart("extrapolated")
    start.update(FIRST)
    assert start.initial_guess(like, columns) is None


def test_a_change_of_shape_starts_anew() -> None:
    start = WarmStart("extrapolated")
    start.update(FIRST)
    start.update(SECOND[:, :2])
    assert (start.initial_guess(LIKE, 2) == 3).all()


def test_state_resumes_and_moves() -> None:
    start, resumed = WarmStart("extrapolated"), WarmStart("extrapolated")
    start.update(FIRST)
    start.update(SECOND)
    resumed.load_tensors(start.tensors())
    assert (resumed.initial_guess(LIKE, 3) == 5).all()
    resumed.apply(torch.Tensor.float)
    assert resumed.initial_guess(LIKE.float(), 3).dtype == torch.float32

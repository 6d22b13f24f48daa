"""The solvers' comparison: what is run, and what a cell of its table says."""

import pytest
import torch

from benchmarks.cases import solvers
from benchmarks.datasets import Split
from tests.oracles import problem


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, *, rows: int, dtype: torch.dtype) -> Split:
        x, _, y = problem(rows)
        return Split(name, x.to(dtype), y.to(dtype), x[:1], y[:1])

    monkeypatch.setattr(solvers, "load", load)


@pytest.mark.usefixtures("small")
def test_every_solver_is_run_to_its_tolerance() -> None:
    for name in solvers.NAMES:
        outcome = solvers.epochs(on="easy", solver=name, rows=60, tolerance=0.01, max_epochs=3000, block_size=20)
        assert outcome["status"] == "CONVERGED", name
        assert outcome["residual"] <= 0.01 * (1 + 1e-6)
        assert solvers.shown(outcome) == f"{outcome['epochs']:.0f} + {outcome['overhead']:.1f}"


@pytest.mark.usefixtures("small")
def test_what_does_not_converge_shows_what_was_left() -> None:
    outcome = solvers.epochs(
        on="hard", solver="StochasticDualDescent", rows=60, tolerance=0.01, max_epochs=2, block_size=20
    )
    assert solvers.shown(outcome) == f"residual {outcome['residual']:.2g}"


@pytest.mark.usefixtures("small")
def test_systems_are_what_they_are_said_to_be() -> None:
    for name, (dataset, noise, lengthscale) in solvers.SYSTEMS.items():
        operator, rhs = solvers.system(name, 30)
        assert rhs.shape == (30, 16)
        x = problem(30)[0] if isinstance(dataset, str) else solvers._data(dataset, 30)[0]
        scaled = 3**0.5 * torch.cdist(x, x) / lengthscale
        expected = (1 + scaled) * torch.exp(-scaled) + noise * torch.eye(30).double()
        torch.testing.assert_close(operator.to_dense(), expected)

"""The comparison of fits with the exact optimum, on a few synthetic rows."""

import pytest
import torch

from benchmarks.cases import optimum
from benchmarks.datasets import Split


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(6 * x).sum(-1) + 0.3 * torch.randn(120, generator=generator, dtype=torch.float64)

    def load(name: str, split: int, *, rows: int, dtype: torch.dtype) -> Split:
        return Split(name, *(tensor[:rows].to(dtype) for tensor in (x, y, x, y)))

    monkeypatch.setattr(optimum, "load", load)


@pytest.mark.usefixtures("rows")
def test_a_fit_ends_at_the_optimum_of_the_exact_value_and_not_above_it() -> None:
    exact = optimum.climb(dataset="some", split=0, rows=120)
    found = optimum.fitted(dataset="some", split=0, rows=120)
    assert found["status"] == "CONVERGED"
    assert -1e-3 < exact["value"] - found["value"] < 0.1
    assert found["noise"] == pytest.approx(exact["noise"], rel=0.1)


@pytest.mark.usefixtures("rows")
def test_a_fit_by_probes_ends_near_it_and_not_above_it() -> None:
    exact = optimum.climb(dataset="some", split=0, rows=120)
    by_probes = optimum.fitted(dataset="some", split=0, rows=120, dtype=torch.float32)
    assert 0 < exact["value"] - by_probes["value"] < 5  # float32, probes: near the optimum, and below it

import pytest

from benchmarks.cases.composite import MODELS, train


@pytest.mark.parametrize("kind", MODELS)
def test_losses_are_those_of_gpytorch(kind: str) -> None:
    ours, stock = (train(whose, kind, n=40, steps=2)["losses"] for whose in ("ours", "GPyTorch"))
    assert ours == pytest.approx(stock, rel=1e-4)

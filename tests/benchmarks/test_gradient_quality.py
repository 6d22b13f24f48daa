"""The table of probe distributions rests on exact traces; its errors are those of the probes alone."""

import gpytorch
import pytest
import torch

from benchmarks.cases import gradient_quality as benchmark
from benchmarks.datasets import Split
from benchmarks.models import MaternRegression
from tests.exact.gaussian_models import data


def test_the_exact_gradient_is_that_of_gpytorch() -> None:
    x, y = data(30)
    problem = benchmark.TraceProblem(x, y, sigma=0.3, lengthscale=1.5)
    model = MaternRegression(Split("data", x, y, x, y))
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def value(logarithms: torch.Tensor) -> float:
        values = logarithms.exp()
        model.covar_module.base_kernel.lengthscale = values[:3]
        model.covar_module.outputscale = values[3]
        model.likelihood.noise = values[4:].square()
        with torch.no_grad():
            return 30 * float(mll(model(x), y))

    start = torch.tensor([1.5, 1.5, 1.5, 1.0, 0.3], dtype=torch.float64).log()
    steps = 1e-4 * torch.eye(5, dtype=torch.float64)[[0, 1, 3, 4]]
    expected = [(value(start + step) - value(start - step)) / 2e-4 for step in steps]
    assert problem.gradient().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(25)
    monkeypatch.setattr(benchmark, "load", lambda name, rows, dtype: Split(name, x, y, x, y))
    monkeypatch.setattr(
        benchmark,
        "DISTRIBUTIONS",
        {name: benchmark.DISTRIBUTIONS[name] for name in ("exact prior", "features 250, corrected", "Rademacher")},
    )
    frame = benchmark.error_table("data", 25, 0.3, num_probes=8, repeats=30, seed=0)
    assert list(frame.index) == [benchmark.GRADIENT, *benchmark.DISTRIBUTIONS]
    assert frame.loc["exact prior", benchmark.WORST] == 1
    errors = frame.loc[list(benchmark.DISTRIBUTIONS), list(benchmark.ENTRIES)]
    # 2 tr(A^2) / (4 s), A = H^-1 dH: for the noise scale, A = 2 sigma^2 H^-1.
    inverse = benchmark.TraceProblem(x, y, 0.3, 2.0).factor.inverse()
    variance = 2 * float((2 * 0.09 * inverse).square().sum()) / (4 * 8)
    assert errors.loc["exact prior", "noise scale"] == pytest.approx(variance**0.5, rel=0.4)
    assert (errors > 0).all(axis=None)
    again = benchmark.error_table("data", 25, 0.3, num_probes=8, repeats=30, seed=0)
    assert again.equals(frame)

"""The Laplace benchmarks' own arithmetic and data."""

import gzip
import math
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch

from benchmarks.cases import laplace_classification, laplace_poisson, laplace_size
from benchmarks.cases.laplace_classification import CASE, Clock, LaplaceClassifier, class_kernel, table
from benchmarks.datasets import gaussian_mixture, mnist_digits
from benchmarks.metrics import classification_scores
from benchmarks.runs import Measured, Run
from benchmarks.variational import VariationalGP


def test_scores() -> None:
    y = torch.tensor([0, 1, 1, 0])
    sure = torch.tensor([[1.0, 0], [0, 1], [0, 1], [1, 0]])
    assert classification_scores(sure, y) == {"accuracy": 1.0, "nll": 0.0, "ece": 0.0}
    even = torch.full((4, 2), 0.5)
    found = classification_scores(even, y)
    assert found["nll"] == pytest.approx(math.log(2))
    assert found["ece"] == pytest.approx(abs(0.5 - found["accuracy"]))
    wrong = classification_scores(torch.tensor([[0.2, 0.8]]), torch.tensor([0]))
    assert wrong["accuracy"] == 0
    assert wrong["ece"] == pytest.approx(0.8, abs=1e-6)


def test_mixture_is_balanced_and_as_the_recipe_says() -> None:
    data = gaussian_mixture(5000, test_rows=100)
    assert data.train_x.shape == (5000, 3)
    assert torch.bincount(data.train_y).tolist() == [500] * 10
    assert data.test_x.shape == (100, 3)
    for label in range(10):
        part = data.train_x[data.train_y == label].double()
        assert part.mean(0).abs().max() < 1.1
        values = torch.linalg.eigvalsh(part.T.cov())
        assert values.min() > 0.0005
        assert values.max() < 0.13
    torch.testing.assert_close(gaussian_mixture(50).train_x, gaussian_mixture(50).train_x)


def test_digits_are_split_without_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    images = np.arange(10_000, dtype=np.uint32).view(np.uint8).reshape(10_000, 4)
    pixels = np.zeros((10_000, 784), dtype=np.uint8)
    pixels[:, :4] = images
    labels = (np.arange(10_000) % 10).astype(np.uint8)
    for name, header, array in (("images-idx3", 16, pixels), ("labels-idx1", 8, labels)):
        content = gzip.compress(bytes(header) + array.tobytes(), compresslevel=1)
        (folder / f"t10k-{name}-ubyte.gz").write_bytes(content)
    monkeypatch.setenv("GPY_ITERATIVE_DATA", str(tmp_path))
    data = mnist_digits(8000)
    assert data.train_x.shape == (8000, 784)
    assert data.test_x.shape == (2000, 784)
    numbers = (torch.cat([data.train_x, data.test_x])[:, :4].double() * 255).round() @ torch.tensor(
        [1.0, 256.0, 65536.0, 2.0**24], dtype=torch.float64
    )
    assert sorted(numbers.long().tolist()) == list(range(10_000))
    assert torch.equal(numbers.long() % 10, torch.cat([data.train_y, data.test_y]))
    monkeypatch.setenv("GPY_ITERATIVE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="GPY_ITERATIVE_DATA"):
        mnist_digits()


def test_contenders_have_the_same_prior() -> None:
    data = gaussian_mixture(40, test_rows=10)
    ours = LaplaceClassifier(data.train_x, data.train_y, 10, 0.7)
    theirs = VariationalGP(data.train_x[:7], gpytorch.means.ZeroMean(), class_kernel(0.7), 10)
    dense = [model.covar_module(data.train_x).to_dense() for model in (ours, theirs)]
    torch.testing.assert_close(*dense)
    assert theirs(data.test_x).mean.shape == (10, 10)
    assert ours.eval().predict_proba(data.test_x).shape == (10, 10)


def test_refinements_are_measured_with_what_they_take() -> None:
    data = gaussian_mixture(40, test_rows=10)
    model = LaplaceClassifier(data.train_x, data.train_y, 10, 0.7, solver=laplace_poisson.LaplaceNewton())
    clock = Clock(data, 60.0)
    taken = laplace_classification._measure_laplace(clock, model, 1)
    kinds = ["pairwise", "diagonal", "mc", "mode"]
    assert [point["kind"] for point in clock.curve] == kinds + [f"refined {kind}" for kind in kinds]
    plain, refined = clock.curve[0], clock.curve[-1]
    assert refined["seconds"] > plain["seconds"] > 0
    assert refined["products"] >= plain["products"] > 0
    assert taken >= refined["seconds"] - plain["seconds"]
    assert refined["nll"] != clock.curve[3]["nll"]
    assert model.training
    assert model.num_refinements == 0


def test_products_are_far_fewer_than_those_of_the_published_algorithm() -> None:
    """The draws of the published study on which the published algorithm converges, and the larger problem."""
    ours = {"10x10": (laplace_poisson.study, 10, 10, 8), "n = 300": (laplace_poisson.larger, 60, 20, 0)}
    for make, outer, inner, draw in ours.values():
        solvers = [
            kind(max_outer=outer, max_inner=inner, tolerance=1e-6)
            for kind in (laplace_poisson.LiteralNewton, laplace_poisson.LaplaceNewton)
        ]
        published, found = (laplace_poisson.run(solver, *make(draw)) for solver in solvers)
        assert published["products"] is not None
        assert found["products"] <= published["products"] / 3
        assert found["error"] < 1e-3


def test_products_count_only_where_both_reach_the_mode() -> None:
    reached, lost = {"products": 30.0}, {"products": None}
    outcomes = {"a": {"published": [reached, lost], "ours": [{"products": 10.0}, {"products": 1.0}]}}
    assert laplace_poisson.summary(outcomes) == [["a", "1 of 2", "2 of 2", "30", "10", "0.33", "0.33"]]


def test_a_contender_is_shown_by_its_last_measurement() -> None:
    point = {"seconds": 1.0, "kind": "mc", "accuracy": 0.5, "nll": 1.0, "ece": 0.1}
    outcome = {"curve": [point, point | {"nll": 0.5}], "peak_memory_mb": 10.0}
    rows = table([Measured(Run(CASE, "x", {}), outcome)], "title").rows
    assert rows == [["x", "mc", "0.5000", "0.5000", "0.100", "", "1", "10"]]


@pytest.mark.slow
def test_preconditioned_modes_of_larger_data_take_fewer_products() -> None:
    options = {"rows": 300, "max_rank": 20, "covariance_actions": 20, "max_outer": 100, "refinements": 0}
    plain, preconditioned = (laplace_size.find_mode(rank=rank, **options) for rank in (0, 50))
    assert plain["converged"]
    assert preconditioned["converged"]
    assert preconditioned["products"] < plain["products"] / 2
    for method in ("mode", "mc"):
        assert preconditioned["scores"][method]["nll"] == pytest.approx(plain["scores"][method]["nll"], rel=0.25)

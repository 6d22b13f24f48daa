"""The benchmarks' own arithmetic and input: what their numbers rest on."""

import gzip
import hashlib
import math
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from benchmarks import datasets, metrics
from benchmarks.busy_processes import busy_processes
from benchmarks.cases.step import relative_errors
from benchmarks.datasets import MissingDataError, Split, airport_weather, load, standardise
from benchmarks.metrics import prediction_scores, regression_scores
from benchmarks.models import MaternRegression
from benchmarks.variational import cluster_centres, random_rows


def write(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of eight rows, two splits, in the published format, with its checksums."""
    contents = {
        "data.csv.gz": "\n".join(f"{i},{i % 3},5,{2 * i}" for i in range(8)).encode(),
        "test_mask.csv.gz": "\n".join(f"{int(i == 0)},{int(i > 5)}" for i in range(8)).encode(),
    }
    (folder / name).mkdir()
    for file, content in contents.items():
        (folder / name / file).write_bytes(gzip.compress(content))
    sums = tuple(hashlib.sha256(content).hexdigest() for content in contents.values())
    monkeypatch.setitem(datasets.CHECKSUMS, name, sums)
    monkeypatch.setenv("GPY_ITERATIVE_DATA", str(folder))


def test_a_split_is_standardised_by_its_training_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "tiny", monkeypatch)
    split = load("tiny", 1, dtype=torch.float64)
    assert split.train_x.shape == (6, 3)
    assert split.test_x.shape == (2, 3)
    torch.testing.assert_close(split.train_x[:, :2].mean(0), torch.zeros(2).double())
    torch.testing.assert_close(split.train_x[:, :2].std(0, correction=0), torch.ones(2).double())
    assert (split.train_x[:, 2] == 0).all()  # a constant column keeps its scale
    torch.testing.assert_close(split.train_y, split.train_x[:, 0])
    assert len(load("tiny", 1, rows=3).train_y) == 3


def test_missing_and_altered_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "tiny", monkeypatch)
    with pytest.raises(ValueError, match="Unknown data set 'nothing'"):
        load("nothing")
    with pytest.raises(ValueError, match="splits 0 to 1"):
        load("tiny", 2)
    with pytest.raises(ValueError, match="rows must be at least 1, got -3"):
        load("tiny", 1, rows=-3)
    (tmp_path / "tiny" / "data.csv.gz").write_bytes(gzip.compress(b"1,2,3"))
    with pytest.raises(ValueError, match="SHA-256"):
        load("tiny")
    (tmp_path / "tiny" / "data.csv.gz").unlink()
    with pytest.raises(MissingDataError, match="GPY_ITERATIVE_DATA"):
        load("tiny")


def test_airport_weather_is_there() -> None:
    frame = airport_weather()
    assert len(frame) == 26_115
    assert set(frame["origin"]) == {"EWR", "JFK", "LGA"}


def test_scores() -> None:
    target = torch.tensor([1.0, 2.0])
    rmse, log_likelihood = regression_scores(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 4.0]), target)
    assert rmse == pytest.approx(math.sqrt(0.5))
    expected = [
        torch.distributions.Normal(0.0, 1.0).log_prob(target[0]),
        torch.distributions.Normal(2.0, 2.0).log_prob(target[1]),
    ]
    assert log_likelihood == pytest.approx(float(sum(expected)) / 2)


def test_predictions_are_scored_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def predict(x: torch.Tensor) -> MultivariateNormal:
        asked.append(len(x))
        return MultivariateNormal(x.sin().squeeze(-1), torch.diag(1 + x.square().squeeze(-1)))

    x = torch.linspace(-1, 1, 7).unsqueeze(-1)
    y = x.squeeze(-1)
    monkeypatch.setattr(metrics, "CHUNK", 3)
    assert prediction_scores(predict, x, y) == pytest.approx(regression_scores(y.sin(), 1 + y.square(), y))
    assert asked == [3, 3, 1]


def test_inducing_points_start_at_the_centres_of_clusters() -> None:
    x = torch.rand(500, 2, generator=torch.Generator().manual_seed(0))
    centres = cluster_centres(x, 12)
    assert centres.shape == (12, 2)
    assert centres.dtype == torch.float32
    nearest = torch.cdist(x, centres).argmin(-1)
    means = torch.stack([x[nearest == index].mean(0) for index in range(12)])
    torch.testing.assert_close(centres, means, atol=0.03, rtol=0)
    assert torch.cdist(x, centres).amin(-1).mean() < 0.9 * torch.cdist(x, random_rows(x, 12)).amin(-1).mean()
    assert cluster_centres(x[:3], 5).shape == (3, 2)


def test_relative_errors_are_root_mean_squares_over_seeds() -> None:
    assert relative_errors([[[3.0, 4.0], [3.0, 5.0]]], [[3.0, 4.0]]) == pytest.approx([math.sqrt(0.5) / 5])


def test_a_column_that_is_constant_but_for_rounding_keeps_its_scale() -> None:
    x, y = np.full((1000, 1), 0.1), np.arange(1000.0)
    assert 0 < x.std() < 1e-15
    split = standardise("constant", x, y, np.full((1, 1), 0.3), y[:1], torch.float64)
    assert split.test_x.item() == pytest.approx(0.2)


def test_flat_parameters_round_trip() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 3)), rng.normal(size=10)
    split: Split = standardise("random", x, y, x, y, torch.float32)
    model = MaternRegression(split)
    assert model.covar_module.outputscale.item() == pytest.approx(1.0)
    values = torch.arange(model.flat_parameters().numel()).float()
    model.set_flat_parameters(values)
    assert torch.equal(model.flat_parameters(), values)


def test_busy_processes_are_there_and_gone():
    count = lambda: sum("while True: pass" in child.cmdline() for child in psutil.Process().children())
    with busy_processes(2):
        deadline = time.monotonic() + 30
        while count() < 2 and time.monotonic() < deadline:  # a child shows its command once it has started
            time.sleep(0.01)
        assert count() == 2
    assert count() == 0

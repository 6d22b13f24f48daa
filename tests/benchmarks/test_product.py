"""The contenders of the product compute the same, and only those run that there is memory for."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cases import product
from benchmarks.cases.product import (
    BOUND,
    KEPT_BOUND,
    PRODUCTS,
    draw,
    has_room,
    measure,
    needed_memory,
    problem,
    reference,
    table,
)
from benchmarks.suite import CASES, Preset

N, D = 1100, 3
#: What is compiled for each shape is tested with the package.
UNCOMPILED = ("tiles", "tiles, kept", "row blocks", "GPyTorch", BOUND, KEPT_BOUND)


def dense(name: str, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The product with Matern-3/2 at lengthscale 1; a bound's, with the inner products alone or with ones."""
    r = 3**0.5 * torch.cdist(x, x)
    matrices = {BOUND: x @ x.mT, KEPT_BOUND: torch.ones_like(r)}
    return matrices.get(name, (1 + r) * torch.exp(-r)) @ v


@pytest.mark.parametrize("name", [*UNCOMPILED, "KeOps"])
def test_every_contender_computes_the_product(name: str) -> None:
    x, v = problem(N, D, 5, "float64")
    assert (x.dtype, x.shape, v.shape) == (torch.float64, (N, D), (N, 5))
    with torch.no_grad():
        run = PRODUCTS[name](x, v)
        for _ in range(2):
            torch.testing.assert_close(run(), dense(name, x, v))


@pytest.mark.parametrize("name", ["tiles", "tiles, kept", "row blocks", BOUND, KEPT_BOUND])
def test_contenders_stay_on_their_device(name: str, device: torch.device) -> None:
    x, v = problem(40, D, 2, "float64", device)
    with torch.no_grad():
        found = PRODUCTS[name](x, v)()
    assert found.device.type == device.type
    torch.testing.assert_close(found.cpu(), dense(name, x.cpu(), v.cpu()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_contender_runs_on_a_gpu(name: str) -> None:
    crashes = importlib.metadata.version("pykeops") == "2.3" and (torch.version.cuda or "").startswith("13.")
    if "KeOps" in name and crashes:
        pytest.skip("KeOps 2.3 crashes with CUDA 13")
    found, expected = (PRODUCTS[name](*problem(N, D, 5, "float64", device))() for device in ("cuda", "cpu"))
    torch.testing.assert_close(found, expected, check_device=False)


def test_a_contender_and_its_reference_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is ten times slower in the second turn; the ratios are .5, .9 and 1.5."""
    now, order = [0.0], []
    taken = {"tiles, kept": iter([9.0, 2.0, 40.0, 4.0]), KEPT_BOUND: iter([9.0, 1.0, 36.0, 6.0])}
    monkeypatch.setattr(product, "clock", lambda device: now[0])

    def prepare(name: str) -> Any:
        def run() -> None:
            order.append(name)
            now[0] += next(taken[name])

        return lambda x, v: run

    monkeypatch.setattr(product, "PRODUCTS", {name: prepare(name) for name in taken})
    monkeypatch.setattr(product, "peak_memory", lambda: {"peak_memory_mb": float(len(order))})
    found = measure("tiles, kept", n=4, d=1, s=1, repeats=3)
    assert found == {"seconds": [2.0, 40.0, 4.0], "best": 2.0, "reference_ratio": 0.9, "peak_memory_mb": 1.0}
    assert order == ["tiles, kept", KEPT_BOUND] * 4


def test_what_contenders_are_held_against() -> None:
    special = {"tiles, kept": KEPT_BOUND, KEPT_BOUND: KEPT_BOUND, "tiles, derivative": "tiles"}
    assert {name: reference(name) for name in PRODUCTS} == dict.fromkeys(PRODUCTS, BOUND) | special


def test_what_holds_a_matrix_needs_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "free_memory", lambda device: 5 * 4 * 1000**2)
    assert has_room("GPyTorch", 1000, "float32", "cpu")
    assert not has_room("GPyTorch", 1001, "float32", "cpu")
    assert not has_room("GPyTorch", 1000, "float64", "cpu")
    assert not has_room("row blocks", 10**6, "float32", "cpu")
    assert all(has_room(name, 10**6, "float32", "cpu") for name in ("tiles", "KeOps", BOUND))
    # No CPU keeps more than 4 GB of tiles.
    assert not has_room("tiles, kept", 50_000, "float32", "cpu")
    assert needed_memory("tiles, kept", 10_000, "float32", "cpu") == pytest.approx(4 * 10_000**2 / 2, rel=0.1)


def test_every_size_is_measured_with_what_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Any, ...]] = []
    saved: dict[str, Any] = {}

    def run_contenders(case: str, names: list[str], *, n: int, s: int, **options: Any) -> dict[str, Any]:
        asked.append((n, s, tuple(names), options["dtype"]))
        return {name: {"best": float(n), "reference_ratio": 1.0, "peak_memory_mb": 1.0} for name in names}

    monkeypatch.setattr(product, "run_contenders", run_contenders)
    monkeypatch.setattr(product, "finish", lambda name, options, threads, **content: saved.update(content))
    monkeypatch.setattr(product, "free_memory", lambda device: 10**9)
    arguments = [
        "product",
        "--n",
        "1000",
        "--n",
        "20000",
        "--only",
        "GPyTorch",
        "--only",
        "KeOps",
        "--dtype",
        "float64",
    ]
    result = CliRunner().invoke(app, [*arguments, "--picture", str(tmp_path / "product.svg")])
    assert result.exit_code == 0, result.output
    both, one = ("GPyTorch", "KeOps"), ("KeOps",)
    assert asked == [(n, s, names, "float64") for n, names in ((1000, both), (20_000, one)) for s in (1, 65)]
    assert "GPyTorch: no room for 16.0 GB at n = 20,000" in result.output
    assert list(saved["outcomes"]) == ["n=1000 s=1", "n=1000 s=65", "n=20000 s=1", "n=20000 s=65"]
    assert (tmp_path / "product.svg").exists()
    for bad in (["--n", "0"], ["--s", "0"], ["--repeats", "0"], ["--dtype", "float16"]):
        assert CliRunner().invoke(app, ["product", *bad]).exit_code == 2


def test_the_picture_is_logarithmic_in_both_axes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(product, "save_figure", lambda figure, path: drawn.append(figure) or path)
    outcomes = {(n, s): {"KeOps": {"best": n * s / 1e3}} for n in (3000, 1000) for s in (1, 65)}
    outcomes[1000, 1][BOUND] = {"best": 0.5}
    draw(outcomes, tmp_path / "product.svg")
    panels = drawn[0].axes
    assert [panel.get_title() for panel in panels] == ["one column", "65 columns"]
    for panel in panels:
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    lines = {line.get_label(): line.get_xydata().tolist() for line in panels[0].get_lines()}
    assert lines == {"KeOps": [[1000, 1], [3000, 3]], BOUND: [[1000, 0.5]]}


def test_the_table_has_times_over_each_contenders_own() -> None:
    outcomes = {
        name: {"best": best, "reference_ratio": 1 / best, "peak_memory_mb": 1.0}
        for name, best in (("tiles", 2.0), ("KeOps", 18.0))
    }
    shown = table(outcomes, {"n": 10, "d": 2, "s": 65})
    assert shown.title == "n = 10, d = 2, 65 right-hand sides, float32, cpu"
    assert shown.rows[0] == ["tiles", "2", BOUND, "0.50", "9.00", "1"]
    assert table({"tiles": outcomes["tiles"]}, {"n": 10, "d": 2, "s": 65}).rows == [
        ["tiles", "2", BOUND, "0.50", "nan", "1"]
    ]


def test_the_suite_has_a_table_for_each_number_of_columns() -> None:
    case = CASES["product"]
    runs = case.runs(Preset.QUICK)
    found = [product.Measured(run, {"best": 1.0, "reference_ratio": 1.0, "peak_memory_mb": 1.0}) for run in runs]
    tables = case.tables(found)
    assert [shown.title.split(", ")[2] for shown in tables] == ["1 right-hand sides", "65 right-hand sides"]
    assert all(len(shown.rows) == len(PRODUCTS) for shown in tables)

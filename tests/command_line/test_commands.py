"""The two commands on a small table, from its file to the files that they write."""

import csv
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch

import gpy_iterative as gpi
from gpy_iterative.command_line import commands
from gpy_iterative.command_line.commands import main, split
from gpy_iterative.command_line.model import TableModel
from gpy_iterative.errors import ConvergenceWarning, DataWarning
from tests.command_line.homes import Homes, homes, written


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a fit to homes.csv, and what it printed."""
    folder = tmp_path_factory.mktemp("fitted")
    path = written(folder / "homes.csv", homes(), ";")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *parts, sep=" ", **options: printed.append(sep.join(map(str, parts))))
        assert main(["fit", str(path), "--target", "price", "--plot", str(folder / "homes.png")]) == 0
    return folder, "\n".join(printed)


def predictions(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return tuple(np.array([row[name] for row in rows]) for name in ("price_mean", "price_deviation"))


def test_the_report_speaks_of_the_tables_columns_and_units(fitted: tuple[Path, str]) -> None:
    folder, printed = fitted
    assert "72 rows to learn from, 8 held out" in printed
    for line in ("  area: number\n", "  built: date\n", "  district: category Harbour, North, South\n"):
        assert line in printed
    assert "Constant, and left out: floors." in printed
    assert gpi.fitting.FitStatus.CONVERGED.advice in printed
    noise = float(printed.split("noise of price (standard deviation): ")[1].split(",")[0])
    assert 3 < noise < 8
    error = float(printed.split("root mean square error: ")[1].split(" ")[0])
    assert error < 12  # the deviation of the prices is 160
    assert (folder / "homes.png").stat().st_size > 1000


def test_predictions_are_those_of_the_dense_process_in_the_targets_units(fitted: tuple[Path, str]) -> None:
    folder, _ = fitted
    new = {name: cells[::-1] for name, cells in homes(90).items() if name not in ("price", "floors")}
    assert main(["predict", str(folder / "homes.gpi.pt"), str(written(folder / "new.csv", new))]) == 0
    mean, deviation = predictions(folder / "new.predictions.csv")

    saved = TableModel.load(folder / "homes.gpi.pt")
    x = np.concatenate([column.encode(new[column.name]) for column in saved.columns], axis=1)
    regression = saved.regression.double()
    kernel, noise = regression.covar_module, regression.likelihood.noise
    train_x, train_y = (part.double() for part in (*regression.train_inputs, regression.train_targets))
    with torch.no_grad(), gpytorch.settings.lazily_evaluate_kernels(False):
        scaled = (torch.tensor(x) - saved.input_units.mean) / saved.input_units.scale
        cross = kernel(scaled, train_x).to_dense()
        matrix = kernel(train_x).to_dense() + noise * torch.eye(80, dtype=torch.float64)
        constant = regression.mean_module.constant
        expected = constant + cross @ torch.linalg.solve(matrix, train_y - constant)
        variance = kernel(scaled, diag=True) - (cross * torch.linalg.solve(matrix, cross.T).T).sum(-1) + noise
    scale = saved.target_units.scale
    np.testing.assert_allclose(mean.astype(float), expected * scale + saved.target_units.mean, atol=1e-3)
    np.testing.assert_allclose(deviation.astype(float), variance.sqrt() * scale, rtol=1e-4)


def test_the_file_has_all_rows_and_opens_as_plain_tensors(fitted: tuple[Path, str]) -> None:
    folder, _ = fitted
    saved = torch.load(folder / "homes.gpi.pt", weights_only=True)
    assert saved["inputs"].shape == (80, 6)
    prices = saved["targets"] * saved["target_units"]["scale"] + saved["target_units"]["mean"]
    np.testing.assert_allclose(prices, np.array(homes()["price"], dtype=float), rtol=1e-6)
    kept, held_out = split(80, 0)
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(80))
    np.testing.assert_allclose(
        saved["target_units"]["mean"], prices[kept].mean(), rtol=1e-6
    )  # held-out rows do not take part


def test_rows_with_gaps_have_no_prediction(fitted: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = fitted
    new = homes(5)
    new["area"][1], new["built"][3] = "NA", ""
    output = folder / "gaps.csv"
    words = ["predict", str(folder / "homes.gpi.pt"), str(written(folder / "new.csv", new)), "--output", str(output)]
    assert main(words) == 0
    mean, deviation = predictions(output)
    assert [value == "" for value in mean] == [value == "" for value in deviation] == [False, True, False, True, False]
    assert "3 rows; no prediction for 2 rows with missing values." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"area": None}, r"no column 'area'; its columns are built, "),
        (
            {"district": ["West"]},
            r"Column 'district' has 'West' in row 1, but the model knows only 'Harbour', 'North', 'South'",
        ),
        ({"area": ["wide"]}, "Column 'area' has 'wide' in row 1, which is no number"),
        ({"built": ["1999"]}, "Column 'built' has '1999' in row 1, which is no date"),
        ({"price_mean": ["1"]}, "has a column price_mean or price_deviation already"),
    ],
)
def test_says_what_cannot_be_predicted(
    change: dict[str, list[str] | None], said: str, fitted: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = fitted
    table = {name: cells for name, cells in (homes(1) | change).items() if cells is not None}
    output = folder / "none.csv"
    words = ["predict", str(folder / "homes.gpi.pt"), str(written(folder / "new.csv", table)), "--output", str(output)]
    check_refused(words, said, capsys)
    assert not output.exists()


def test_says_what_is_no_model(fitted: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = fitted
    table, other = str(folder / "homes.csv"), tmp_path / "other.pt"
    output = ["--output", str(tmp_path / "out.csv")]
    check_refused(["predict", str(other), table, *output], "cannot be read", capsys)
    check_refused(["predict", table, table, *output], "The model comes first, then the table.", capsys)
    torch.save({"format": 1}, other)
    check_refused(["predict", str(other), table, *output], "is no model that", capsys)
    for first_letter in "ahbJ":  # pickle reads them as instructions
        other.write_text(f"{first_letter},price\n1,2\n")
        check_refused(["predict", str(other), table, *output], "is no model that", capsys)
    model = str(folder / "homes.gpi.pt")
    for written_to in (table, model):
        words = ["predict", model, table, "--output", written_to]
        check_refused(words, f"{written_to} is another file of this command", capsys)
    check_refused(["predict", model, str(folder)], "is a folder", capsys)


def test_says_what_lies_too_far_from_the_training_data(
    fitted: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = fitted
    table = homes(2) | {"area": ["80", "1.7e308"]}
    words = ["predict", str(folder / "homes.gpi.pt"), str(written(folder / "far.csv", table))]
    units = TableModel.load(folder / "homes.gpi.pt").input_units
    assert units.scale[0] > 1  # in float64 the value would be finite
    small = {name: cells for name, cells in homes().items() if name in ("area", "price")}
    small["area"] = [f"{float(cell) / 1e6}" for cell in small["area"]]
    assert main(fit_words(folder, small, "--max-steps", "1", "--output", str(folder / "small.pt"))) == 0
    capsys.readouterr()
    words[1] = str(folder / "small.pt")
    check_refused(words, "area is 1.7e+308 in a row, too far from the training data", capsys)


@pytest.mark.parametrize("factor", [1e160, 1e-170])
def test_inputs_of_any_size_are_learned(factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {name: cells for name, cells in homes().items() if name in ("area", "price")}
    errors = []
    for size in (1.0, factor):
        scaled = table | {"area": [f"{float(cell) * size!r}" for cell in table["area"]]}
        assert main(fit_words(tmp_path, scaled)) == 0
        error, plain = capsys.readouterr().out.split("root mean square error: ")[1].split(")")[0].split(" (")
        errors.append(float(error) / float(plain))
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_a_target_far_from_zero_keeps_the_digits_that_vary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {name: cells for name, cells in homes().items() if name in ("area", "price")}
    found, intervals = [], []
    for shift in (0.0, 1e11):
        moved = table | {"price": [f"{float(cell) + shift:.3f}" for cell in table["price"]]}
        assert main(fit_words(tmp_path, moved)) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "far from the data" in line)
        intervals.append([float(end) - shift for end in line.split("interval ")[1].rstrip(")").split(" to ")])
        assert main(["predict", str(tmp_path / "homes.gpi.pt"), str(written(tmp_path / "new.csv", table))]) == 0
        found.append(predictions(tmp_path / "new.predictions.csv")[0].astype(float) - shift)
    np.testing.assert_allclose(found[1], found[0], atol=1e-2)
    np.testing.assert_allclose(intervals[1], intervals[0], atol=1.0)


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_a_file_that_cannot_be_written_is_told_before_any_work(
    command: str, fitted: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = fitted
    output = tmp_path / "output.png"
    output.symlink_to(tmp_path / "nowhere" / "output.png")
    given = {
        "fit": ["fit", str(folder / "nothing.csv"), "--target", "price", "--plot", str(output)],
        "predict": ["predict", str(folder / "nothing.pt"), str(folder / "homes.csv"), "--output", str(output)],
    }
    check_refused(given[command], f"{output} cannot be written: ", capsys)


#: There is no room for the name of the temporary file beside it.
LONG_NAME = 250 * "a"


def check_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line on stderr, nothing on stdout."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err


def fit_words(folder: Path, table: Homes, *words: str) -> list[str]:
    return ["fit", str(written(folder / "homes.csv", table)), "--target", "price", *words]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "homes.jpeg"], "--plot homes.jpeg has to end in one of"),
        (["--output", "nowhere/homes.pt"], "nowhere/homes.pt cannot be written"),
        (["--output", LONG_NAME], f"{LONG_NAME} cannot be written: "),
        (["--checkpoint", LONG_NAME], f"{LONG_NAME} cannot be written: "),
        (["--checkpoint", "homes.csv"], "homes.csv is another file of this command"),
        (["--drop", "rooms"], "no column 'rooms'"),
        (["--seed", "-1"], "--seed must be 0 or more, got -1"),
        (["--max-steps", "0"], "--max-steps must be 1 or more, got 0"),
        (["--output", "a.pt", "--checkpoint", "a.pt"], "a.pt is another file of this command"),
    ],
)
def test_says_what_is_wrong_with_an_option_before_any_work(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(fit_words(tmp_path, homes(), *words), said, capsys)


def test_says_that_matplotlib_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_refused(fit_words(tmp_path, homes(), "--plot", "homes.png"), "pip install matplotlib", capsys)


def test_a_checkpoint_is_gone_on_from_and_a_foreign_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {name: cells for name, cells in homes().items() if name in ("area", "price")}
    checkpoint = ["--checkpoint", str(tmp_path / "run.pt"), "--max-steps"]
    assert main(fit_words(tmp_path, table, *checkpoint, "1")) == 0
    printed = capsys.readouterr().out
    assert "BUDGET, 1 steps" in printed
    assert "raise --max-steps; with --checkpoint the command goes on from here." in printed
    assert main(fit_words(tmp_path, table, *checkpoint, "2")) == 0
    assert "BUDGET, 2 steps" in capsys.readouterr().out
    for other in (homes(), {name: cells[:60] for name, cells in table.items()}):
        assert main(fit_words(tmp_path, other, *checkpoint, "2")) == 2
        assert "run.pt is no checkpoint of a fit with these data, columns and options: give" in capsys.readouterr().err


def test_many_rows_start_from_fits_to_subsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "ROWS_OF_CHEAP_STEPS", 50)
    table = {name: cells for name, cells in homes().items() if name in ("area", "price")}
    starts = []
    real = commands.fit
    monkeypatch.setattr(commands, "fit", lambda mll, **options: starts.append(options["start"]) or real(mll, **options))
    for words, dtype in (([], torch.float32), (["--double"], torch.float64)):
        assert main(fit_words(tmp_path, table, "--max-steps", "1", *words)) == 0
        assert torch.load(tmp_path / "homes.gpi.pt", weights_only=True)["targets"].dtype == dtype
    assert starts == ["subsets", "subsets"]


def test_a_solve_that_did_not_converge_is_told_in_the_words_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    advice = ConvergenceWarning("It stopped after 2.5 epochs (targets 0.1). Loosen the tolerance. Or use float64.")
    commands.show_note(advice, type(advice), "file", 1)
    commands.show_note(UserWarning("One. Two."), UserWarning, "file", 1)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("note: It stopped after 2.5 epochs (targets 0.1). Scores on held-out rows")
    assert "--double" in first
    assert "Loosen" not in first
    assert second == "note: One. Two."


def interrupting(after: int) -> Callable[..., gpi.fitting.FitResult]:
    """`fit`, with Ctrl-C in the step after so many rows of the history."""

    def interrupt(row: gpi.fitting.HistoryRow) -> None:
        if row.step == after:
            raise KeyboardInterrupt

    return partial(commands.fit, callback=interrupt)


def test_an_interrupted_fit_is_reported_and_saved_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {name: cells for name, cells in homes().items() if name in ("area", "price")}
    monkeypatch.setattr(commands, "fit", interrupting(1))
    assert main(fit_words(tmp_path, table)) == 130
    printed = capsys.readouterr().out
    assert "BUDGET, " in printed
    assert "root mean square error" in printed
    assert TableModel.load(tmp_path / "homes.gpi.pt").target == "price"


def test_ctrl_c_outside_of_the_steps_ends_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "fit", interrupt)
    assert main(fit_words(tmp_path, homes())) == 130
    assert capsys.readouterr().err == "error: interrupted.\n"
    assert not (tmp_path / "homes.gpi.pt").exists()


def test_checking_a_path_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    new, old, link = (tmp_path / f"{name}.png" for name in ("new", "old", "link"))
    old.write_text("old")
    link.symlink_to(new)
    for path in (new, old, link):
        commands.check_can_write(path)
    assert not new.exists()
    assert old.read_text() == "old"
    assert link.is_symlink()


def test_warnings_are_notes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    table = {name: homes(20)[name] * 4 for name in ("area", "price")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [("default", None, DataWarning, None, 0)])
        assert main(fit_words(tmp_path, table, "--max-steps", "1")) == 0
    notes = [line for line in capsys.readouterr().err.split("\n") if line.startswith("note: ")]
    assert len(notes) == 1
    assert "copies" in notes[0]


def test_the_version_and_unknown_options_end_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{gpi.__version__}\n"
    with pytest.raises(SystemExit) as ended:
        main(["fit", "homes.csv"])
    assert ended.value.code == 2


@pytest.mark.slow
def test_runs_as_a_module(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "gpy_iterative", "fit", "homes.csv", "--target", "price"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(gpi.__file__).parents[1]), "KEOPS_CACHE_FOLDER": str(tmp_path / "keops")},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert ran.stderr == "error: homes.csv cannot be read: No such file or directory.\n"


def test_a_value_only_in_held_out_rows_is_told_without_numbers_of_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {name: cells for name, cells in homes().items() if name in ("area", "price")}
    _, held_out = split(80, 0)
    table["garden"] = ["1" if row == held_out[0] else "0" for row in range(80)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [("default", None, DataWarning, None, 0)])
        assert main(fit_words(tmp_path, table, "--max-steps", "1")) == 0
    (note,) = (line for line in capsys.readouterr().err.split("\n") if line.startswith("note: "))
    assert "held out" in note
    assert "--seed" in note
    assert "column" not in note

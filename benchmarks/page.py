"""The page of results, docs/benchmarks.md: made of saved runs alone."""

from collections import Counter
from pathlib import Path

from benchmarks.comparison import described
from benchmarks.runner import RESULTS
from benchmarks.runs import Measured
from benchmarks.suite import CASES, Case, NothingToShowError, Preset, measured, measuring

DOCS = RESULTS.parent.parent / "docs"
INTRODUCTION = """# Benchmarks

This page is made by `make bench` from saved runs (`benchmarks/results/{preset}/`): {meaning}
Every run is a process of its own, and names its machine and versions. `python -m benchmarks list` shows the
cases, `run CASE --preset {preset}` runs one and goes on where it was interrupted, `table CASE` and `plot CASE`
show what is there, and `compare A B` sets two folders of results or two contenders side by side. Published
figures were measured on other machines and larger data: what to compare is ratios. Single measurements with
more explanation are on [Measured](measured.md).
"""
MEANINGS = {
    Preset.SMOKE: "the `smoke` preset, which proves nothing.",
    Preset.QUICK: "the `quick` preset, sizes at which the methods differ as in the papers, less than an hour on two cores.",
    Preset.PAPER: "the `paper` preset, at the papers' sizes.",
}


def render(preset: Preset, folder: Path = RESULTS, docs: Path = DOCS) -> Path:
    """Writes the page and its pictures.

    Raises:
        NothingToShowError: the smoke preset, whose numbers are not to be shown; or nothing was run.
    """
    if preset is Preset.SMOKE:
        raise NothingToShowError("The smoke preset shows that everything runs; its numbers are not to be rendered.")
    found = {case.name: measured(case, preset, folder) for case in CASES.values()}
    if not any(found.values()):
        raise NothingToShowError(f"Nothing is saved in {folder / preset}; {measuring(preset, folder)} measures it.")
    parts = [INTRODUCTION.format(preset=preset.value, meaning=MEANINGS[preset])]
    parts += [_section(CASES[name], runs, preset, docs) for name, runs in found.items() if runs]
    path = docs / "benchmarks.md"
    path.write_text("\n".join(parts))
    return path


def _section(case: Case, found: list[Measured], preset: Preset, docs: Path) -> str:
    lines = [f"## {case.name}", "", f"{case.about} {case.note}".strip(), "", _origin(case, found, preset), ""]
    lines += [table.markdown() for table in case.tables(found)]
    if case.pictures is not None:
        for path in case.pictures(found, docs / "pictures" / "benchmarks"):
            lines += [f"![{path.stem.replace('_', ' ')}]({path.relative_to(docs)})", ""]
    return "\n".join(lines)


def _origin(case: Case, found: list[Measured], preset: Preset) -> str:
    """The environments of the runs, and how many there are of those that the preset plans."""
    counts = Counter(described(measured.outcome["environment"]) for measured in found)
    told = "; ".join(f"{count} run{'s' * (count > 1)}: {environment}" for environment, count in counts.items())
    planned, done = len(case.runs(preset)), sum(measured.is_finished for measured in found)
    missing = f" {done} of {planned} runs are done." if done < planned else ""
    return f"*{told}.*{missing}"

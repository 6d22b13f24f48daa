"""The page of results, docs/benchmarks.md: made of saved runs alone."""

from collections import Counter
from pathlib import Path

from benchmarks.runner import RESULTS
from benchmarks.runs import Measured
from benchmarks.suite import CASES, Case, NothingToShowError, Preset, measured, measuring

DOCS = RESULTS.parent.parent / "docs"
INTRODUCTION = """# Benchmarks

`make bench` makes this page from saved runs (`benchmarks/results/{preset}/`): {meaning}
`python -m benchmarks run CASE --preset {preset}` repeats a case. Published figures are of other machines and larger data:
compare ratios. [Measured](measured.md) has larger measurements, and further cases.

{environments}
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
    everything = [measured for runs in found.values() for measured in runs]
    parts = [INTRODUCTION.format(preset=preset.value, meaning=MEANINGS[preset], environments=_environments(everything))]
    for name, runs in found.items():
        case = CASES[name]
        if runs and (case.shows_tables or case.pictures is not None):
            parts.append(_section(case, runs, preset, docs))
    path = docs / "benchmarks.md"
    path.write_text("\n".join(parts))
    return path


def _section(case: Case, found: list[Measured], preset: Preset, docs: Path) -> str:
    lines = [f"## {case.name}", "", " ".join(filter(None, [case.about, case.note, _missing(case, found, preset)])), ""]
    if case.shows_tables:
        lines += [table.markdown() for table in case.tables(found)]
    if case.pictures is not None:
        for path in case.pictures(found, docs / "pictures" / "benchmarks"):
            lines += [f"![{path.stem.replace('_', ' ')}]({path.relative_to(docs)})", ""]
    return "\n".join(lines)


def _environments(found: list[Measured]) -> str:
    """Machines and versions of all runs."""
    told = (measured.outcome["environment"].items() for measured in found)
    counts = Counter(", ".join(f"{name} {value}" for name, value in environment) for environment in told)
    return "\n".join(f"*{count} run{'s' * (count > 1)}: {environment}.*" for environment, count in counts.items())


def _missing(case: Case, found: list[Measured], preset: Preset) -> str:
    """How many runs there are of those that the preset plans, where they are fewer."""
    planned, done = len(case.runs(preset)), sum(measured.is_finished for measured in found)
    return f"{done} of {planned} runs are done." if done < planned else ""

"""Two folders of results, or two contenders, side by side: ratios of every figure that both have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.runner import Outcome
from benchmarks.runs import Measured
from benchmarks.tables import Table


def figures(outcome: Outcome) -> dict[str, float]:
    """The numbers of an outcome that stand by themselves: no curves, no flags."""
    return {
        name: value for name, value in outcome.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def ratios(first: Outcome, second: Outcome) -> Iterator[list[str]]:
    """Name, both values and first / second, of every common figure."""
    ours, theirs = figures(first), figures(second)
    for name in ours.keys() & theirs.keys():
        ratio = f"{ours[name] / theirs[name]:.3f}" if theirs[name] else ""
        yield [name, f"{ours[name]:.5g}", f"{theirs[name]:.5g}", ratio]


def described(environment: dict[str, Any]) -> str:
    """An environment on one line."""
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def compare_folders(first: Path, second: Path) -> Iterator[Table]:
    """A table for each run that both folders have, whatever the threads and the machine.

    Raises:
        ValueError: the folders have no run in common.
    """
    empty = True
    for path in sorted(first.rglob("*.json")):
        other = second / path.relative_to(first)
        if not other.exists():
            continue
        ours, theirs = (_by_options(file) for file in (path, other))
        for key in (key for key in ours if key in theirs):
            empty = False
            yield _table(f"{path.stem}: {key}", ours[key], theirs[key])
    if empty:
        raise ValueError(f"{first} and {second} have no run in common.")


def compare_contenders(first: str, second: str, found: list[Measured]) -> Iterator[Table]:
    """A table for each pair of runs of the two with the same options.

    Raises:
        ValueError: there is no such pair.
    """
    empty = True
    for ours in found:
        for theirs in found:
            same = {**ours.run.options, "seconds": None} == {**theirs.run.options, "seconds": None}
            if (ours.run.contender, theirs.run.contender) == (first, second) and same:
                empty = False
                options = ", ".join(f"{name} {value}" for name, value in ours.run.options.items())
                yield _table(f"{first} / {second}: {options}", ours.outcome, theirs.outcome)
    if empty:
        known = ", ".join(sorted({measured.run.contender for measured in found}))
        raise ValueError(f"No two runs of {first!r} and {second!r} with the same options; there are: {known}.")


def _by_options(path: Path) -> dict[str, Outcome]:
    runs = json.loads(path.read_text()).get("runs", {})
    named = {}
    for outcome in runs.values():
        # The rival's seconds are measured ones, and differ from machine to machine.
        options = {name: value for name, value in outcome["options"].items() if name != "seconds"}
        named[f"{outcome['contender']}, " + ", ".join(f"{name} {value}" for name, value in options.items())] = outcome
    return named


def _table(title: str, first: Outcome, second: Outcome) -> Table:
    environments = [described(outcome["environment"]) for outcome in (first, second)]
    told = environments[0] if environments[0] == environments[1] else " / ".join(environments)
    return Table(f"{title}\n{told}", ["figure", "first", "second", "first / second"], sorted(ratios(first, second)))

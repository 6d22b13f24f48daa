"""The far field of a kernel matrix: its levels, and the error that was measured."""

from dataclasses import dataclass, replace
from typing import Literal

from gpy_iterative.linear_operators.far_field.build import build_levels
from gpy_iterative.linear_operators.far_field.entries import Entries
from gpy_iterative.linear_operators.far_field.levels import Levels
from gpy_iterative.linear_operators.far_field.measured import measured_error
from gpy_iterative.linear_operators.far_field.plan import RANK_STEP, Plan, make_plan, with_measured_ranks
from gpy_iterative.worker_threads import divided

#: The tolerance that "auto" takes up to so many rows. Beyond, it falls with their number, as the matrix's largest
#: eigenvalue grows and the noise does not; but not below what float32 resolves, which is 1e-7 at best.
TOLERANCE, ROWS, SMALLEST_TOLERANCE = 1e-5, 10_000, 3e-7
#: A far field pays where it evaluates less than this part of the entries of tiles: for "auto", and for a tolerance.
AUTO_PART, GIVEN_PART = 0.5, 1.0
#: Rows from which "auto" counts entries. With fewer, measuring ranks costs more than the products that it could save.
AUTO_ROWS = 4000
#: After a far field that missed its tolerance ranks are measured for so much of the error that would have reached it.
LOWER_AIM = 0.2
#: A second one is taken up to so many tolerances: where rounding is the rest, tiles would take hours for nothing.
MOST_MISSED = 10


@dataclass(frozen=True)
class FarField:
    """A kernel matrix that is compressed.

    Attributes:
        levels: near blocks and skeletons.
        tolerance: the relative error of products with random vectors that was asked for.
        error: that which was measured, on random far entries of each level.
    """

    levels: Levels
    tolerance: float
    error: float


@divided()
def far_field(entries: Entries, wanted: float | Literal["auto"]) -> FarField | None:
    """The far field of a symmetric matrix of these entries; None where it would not pay, or misses its tolerance by far.

    Two are made at the most. The error that is measured is reported, and solves compare themselves with exact rows.
    """
    n = len(entries)
    # Where it pays on CUDA is not measured yet.
    if wanted == "auto" and (n < AUTO_ROWS or entries.device.type != "cpu"):
        return None
    tolerance = max(TOLERANCE * min(1, ROWS / n), SMALLEST_TOLERANCE) if wanted == "auto" else wanted
    limit = (AUTO_PART if wanted == "auto" else GIVEN_PART) * n**2 / 2
    plan = make_plan(entries, tolerance, limit)
    if plan is None or plan.cost >= limit:
        return None
    first = _built(plan, entries, tolerance)
    if first.error <= tolerance:
        return first
    plan = _with_higher_ranks(plan, entries, tolerance / first.error)
    if plan.cost >= limit:
        return None
    second = _built(plan, entries, tolerance)
    return second if second.error <= MOST_MISSED * tolerance else None


def _built(plan: Plan, entries: Entries, tolerance: float) -> FarField:
    levels = build_levels(plan, entries)
    return FarField(levels, tolerance, measured_error(plan, levels, entries))


def _with_higher_ranks(plan: Plan, entries: Entries, ratio: float) -> Plan:
    """The plan for an error that is lower by this ratio and some more."""
    other = with_measured_ranks(replace(plan, error=plan.error * LOWER_AIM * ratio), entries)
    ranks = [max(rank, before + RANK_STEP) for rank, before in zip(other.ranks, plan.ranks, strict=False)]
    return replace(other, ranks=ranks)

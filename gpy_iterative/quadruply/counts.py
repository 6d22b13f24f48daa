"""What options of a quadruply stochastic step mean for a model: features, control points, steps with the same rows."""

import math

from gpy_iterative.checks import check_count
from gpy_iterative.quadruply.model import QuadruplyStochasticGP

#: Defaults, where there are so many.
FEATURE_SAMPLES, CONTROL_POINTS = 10_000, 500
#: How often every feature is sampled, on average, before other rows are drawn. What is then worked out from all features
#: costs a quarter of the steps.
SWEEPS_PER_BATCH = 4


def group_samples(model: QuadruplyStochasticGP, given: int | None, groups: int) -> int:
    """The number of groups of an index set, of so many. Raises ValueError for a number of features that cannot be."""
    size = model.basis.group_size
    if given is None:
        return min(FEATURE_SAMPLES // size, groups)
    check_count("num_feature_samples", given)
    if given % size:
        raise ValueError(f"num_feature_samples must be a multiple of {size}, the features of a group; got {given}.")
    if given > groups * size:
        raise ValueError(
            f"num_feature_samples must be at most {groups * size}, the features beyond those that every step evaluates; "
            f"got {given}."
        )
    return given // size


def control_points(given: int | None, *, serves: bool) -> int:
    """0 where none serve. Raises ValueError where they are asked for all the same."""
    if given is None:
        return CONTROL_POINTS if serves else 0
    if given == 0:
        return 0
    check_count("num_control_points", given)
    if not serves:
        raise ValueError("Control variates are for the stratified estimator and Gaussian noise: num_control_points=0.")
    return given


def steps_per_batch(
    model: QuadruplyStochasticGP, given: int | None, samples: int, *, is_printed: bool, num_control_points: int | None
) -> int:
    """Steps for which rows are kept, with so many groups sampled and control points asked for.

    Raises ValueError for what cannot go together.
    """
    is_sampled = 0 < samples < model.num_tail_groups
    if given is None:
        has_own_head = model.basis.num_head_features > 0
        keeps = is_sampled and not is_printed and not has_own_head and num_control_points is None
        return math.ceil(SWEEPS_PER_BATCH * model.num_tail_groups / samples) if keeps else 1
    check_count("num_steps_per_batch", given)
    if given > 1 and is_printed:
        raise ValueError("Rows are kept for the stratified estimator: num_steps_per_batch=1.")
    if given > 1 and num_control_points:
        raise ValueError(
            "Control points are for rows that are drawn anew by every step: num_control_points=0, or num_steps_per_batch=1."
        )
    return given if is_sampled else 1

"""Where the diagonal of C starts: at its optimum for independent columns, by what the first rows show of the features."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpy_iterative.errors import ApproximationWarning, warn
from gpy_iterative.quadruply.data_terms import Rows
from gpy_iterative.quadruply.feature_weights import FeatureWeights
from gpy_iterative.quadruply.model import QuadruplyStochasticGP

#: Features that are evaluated at a time.
BLOCK = 8192
#: 1 / (the largest curvature of a logistic site): stands for the noise of likelihoods that have none.
LOGISTIC_NOISE = 4.0


@torch.no_grad()
def initialize_weights(model: QuadruplyStochasticGP, rows: Rows, num_data: int) -> None:
    """c_r^2 = 1 / (s_r + phi_r^T phi_r / noise) (proposition 1), once a model; O(b m) where every feature has its own."""
    weights = model.weights
    noise = LOGISTIC_NOISE if rows.noise is None else rows.noise.mean()
    head = model.head_features(rows.x)
    weights.head_log_diagonal.copy_(_log_deviation(num_data * head.square().mean(0) / noise, model.head_precision()))
    if weights.shared_diagonal and weights.num_tail:
        total = num_data * model.tail_prior_variance(rows.x, head).mean() / noise
        weights.tail_log_diagonal.fill_(_log_deviation(total / weights.num_tail, None))
    elif not weights.shared_diagonal:
        for groups in model.tail_blocks(BLOCK):
            gram = num_data * model.tail_features(rows.x, head, groups).square().mean(0) / noise
            index = model.basis.feature_index(groups)
            weights.tail_log_diagonal[index, 0] = _log_deviation(gram, model.tail_precision(groups))
    weights.initialized.fill_(1)


@contextmanager
def initialization_undone(weights: FeatureWeights, *, always: bool) -> Iterator[None]:
    """Weights that were not initialised before are not so after an exception either; `always` in no case."""
    if weights.initialized:
        yield
        return
    diagonals = (weights.head_log_diagonal, weights.tail_log_diagonal)
    before = [diagonal.detach().clone() for diagonal in diagonals]
    undo = True
    try:
        yield
        undo = always
    finally:
        if undo:
            with torch.no_grad():
                for diagonal, values in zip(diagonals, before, strict=True):
                    diagonal.copy_(values)
                weights.initialized.zero_()


@torch.no_grad()
def warn_of_capacity(model: QuadruplyStochasticGP, rows: Rows, num_data: int, parameters: Iterable[Tensor]) -> None:
    """Warns where hyperparameters are free and random features are too many to learn them with."""
    free = any(parameter.requires_grad for parameter in parameters)
    is_random = model.basis.knows_group_variance and not model.basis.num_head_features
    if rows.noise is None or not is_random or not free:
        return
    head = model.head_features(rows.x)
    limit = float(num_data * model.tail_prior_variance(rows.x, head).mean() / rows.noise.mean())
    if model.weights.num_tail >= limit:
        warn(
            f"{model.weights.num_tail} random features with independent posterior deviations are more than n outputscale / "
            f"noise = {limit:.3g}: variances stay above half of the prior's, and hyperparameters that are learned from "
            "this bound drift to too much noise and too small an outputscale. Take NystromBasis, fix the hyperparameters "
            "(requires_grad_(False)), or learn them with another marginal log likelihood.",
            ApproximationWarning,
        )


def _log_deviation(gram: Tensor, precision: Tensor | None) -> Tensor:
    return -0.5 * (gram + (1 if precision is None else precision)).log()

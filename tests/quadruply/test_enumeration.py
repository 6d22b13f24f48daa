"""Averages over all index sets are the exact terms, to rounding; variants that are known to be wrong are not."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpy_iterative.likelihoods import LogitBernoulliLikelihood
from gpy_iterative.models import QuadruplyStochasticGP
from gpy_iterative.quadruply.data_terms import (
    Rows,
    control_term,
    gaussian_term,
    site_bound,
)
from gpy_iterative.quadruply.known_points import KnownLatent
from gpy_iterative.quadruply.samples import Sample, twice_divergence
from tests.quadruply.printed_estimate import printed_estimate
from tests.quadruply.quadruply_models import (
    TableBasis,
    fourier_problem,
    random_features,
    row_numbers,
    set_weights,
    weights_of,
)
from tests.quadruply.weight_space import elbo_terms, quasi_normal, subsets

N, M, NOISE = 3, 4, 0.2


def dense_prior() -> Tensor:
    root = quasi_normal(M, M, root=19.0)
    return root @ root.mT + torch.eye(M).double()


PRIORS = {
    "identity": None,
    "diagonal": torch.tensor([0.7, 1.1, 0.4, 2.0], dtype=torch.float64),
    "dense": dense_prior(),
}


def as_matrix(precision: Tensor | None) -> Tensor:
    if precision is None:
        return torch.eye(M).double()
    return torch.diag(precision) if precision.dim() == 1 else precision


def problem(prior: str, k: int, group_size: int = 1) -> tuple[QuadruplyStochasticGP, Tensor, Tensor]:
    """A model of M features at N data, its targets, and the sum of the exact terms."""
    phi, y = random_features(N, M)
    model = QuadruplyStochasticGP(TableBasis(phi, PRIORS[prior], group_size), num_dense_columns=k)
    mean, root = weights_of(M, k)
    set_weights(model, mean, root)
    return model, y, elbo_terms(phi, as_matrix(PRIORS[prior]), y, NOISE, mean, root).sum()


def rows_of(y: Tensor, index: list[int]) -> Rows:
    noise = torch.full((len(index),), NOISE, dtype=torch.float64)
    return Rows(row_numbers(N)[index], y[index], torch.zeros(len(index), dtype=torch.float64), noise, N / len(index))


def stratified(model: QuadruplyStochasticGP, y: Tensor, rows: list[int], i: list[int], j: list[int]) -> Tensor:
    first, second = (Sample(model, torch.tensor(groups, dtype=torch.int64), sparse=False) for groups in (i, j))
    return gaussian_term(model, rows_of(y, rows), first, second) + twice_divergence(model, first, second)


@pytest.mark.parametrize("prior", list(PRIORS))
@pytest.mark.parametrize(("k", "size", "num_rows"), [(0, 1, 1), (0, 2, 2), (1, 2, 2), (2, 1, 3), (1, 3, 3), (4, 0, 2)])
def test_the_average_over_all_sets_is_exact(prior: str, k: int, size: int, num_rows: int) -> None:
    model, y, truth = problem(prior, k)
    groups, rows = subsets(range(M - k), size), subsets(range(N), num_rows)
    values = torch.stack([stratified(model, y, r, i, j) for i in groups for j in groups for r in rows])
    torch.testing.assert_close(values.mean(), truth, rtol=0, atol=1e-10)
    if size == M - k and num_rows == N:
        torch.testing.assert_close(values, truth.expand_as(values), rtol=0, atol=1e-10)


def test_pairs_are_sampled_together() -> None:
    model, y, truth = problem("diagonal", 2, group_size=2)
    values = torch.stack([stratified(model, y, r, [0], [0]) for r in subsets(range(N), 1)])
    torch.testing.assert_close(values.mean(), truth, rtol=0, atol=1e-10)


def test_one_set_for_both_factors_is_biased() -> None:
    model, y, truth = problem("identity", 0)
    rows = list(range(N))
    values = torch.stack([stratified(model, y, rows, i, i) for i in subsets(range(M), 2)])
    assert abs(values.mean() - truth) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("prior", list(PRIORS))
@pytest.mark.parametrize(("k", "size", "num_rows"), [(0, 2, 2), (2, 2, 3), (4, 1, 1), (4, 4, 3)])
def test_the_printed_theorems_are_exact_on_average(prior: str, k: int, size: int, num_rows: int) -> None:
    model, y, truth = problem(prior, k)
    sets = [torch.tensor(s) for s in subsets(range(M), size)]
    values = []
    for rows in subsets(range(N), num_rows):
        data = rows_of(y, rows)
        for i, j, r in itertools.product(sets, sets, sets):
            values.append(printed_estimate(model, data.x, data.target, data.noise, N, i, j, r))
    torch.testing.assert_close(torch.stack(values).mean(), truth, rtol=0, atol=1e-10)


def control_terms(model: QuadruplyStochasticGP, y: Tensor) -> list[tuple[Tensor, ...]]:
    """Value and gradients of the control variate at points 0 and 2, for all pairs of sets."""
    latent, noise = KnownLatent.start(model, row_numbers(N)[[0, 2]]), torch.full((2,), NOISE, dtype=torch.float64)
    found = []
    groups = [torch.tensor(s) for s in subsets(range(model.num_tail_groups), 2)]
    parameters = [model.weights.head_mean, model.weights.tail_mean]
    if model.weights.num_dense_columns:
        parameters += [model.weights.head_columns, model.weights.tail_columns, model.weights.head_log_diagonal]
    for i, j in itertools.product(groups, groups):
        first, second = (Sample(model, s, sparse=False) for s in (i, j))
        known, _ = latent.evaluate(model, first, second)
        term = control_term(known, first, second, y[[0, 2]], noise)
        gradients = torch.autograd.grad(term, parameters, allow_unused=True, retain_graph=True)
        zero = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        found.append((term.detach(), *zero))
    return found


@pytest.mark.parametrize("k", [0, 1])
def test_the_control_variate_has_expectation_zero(k: int) -> None:
    model, y, _ = problem("identity", k)
    found = control_terms(model, y)
    assert max(float(value.abs()) for value, *_ in found) > 1e-2
    for part in zip(*found, strict=True):
        mean = torch.stack(part).mean(0)
        torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-10)


def test_a_gradient_through_touched_rows_alone_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    # The path through a lives on the touched rows; not multiplied by (all) / (touched), it is too short on average.
    model, y, _ = problem("identity", 0)
    monkeypatch.setattr(model.weights, "num_tail", 0)
    found = control_terms(model, y)
    assert torch.stack([tail for _, _, tail in found]).mean(0).abs().max() > 1e-2


LOGISTIC = LogitBernoulliLikelihood()
KINDS = ["gaussian", "logistic"]


def known_terms(model: QuadruplyStochasticGP, rows: Rows, kind: str, size: int) -> list[tuple[Tensor, ...]]:
    """Value and gradients of -2 E_q log p of rows that are known from all features, for all sets of groups."""
    parameters = [parameter for parameter in model.weights.parameters() if parameter.numel()]
    latent, found = KnownLatent.start(model, rows.x), []
    sets = [torch.tensor(i, dtype=torch.int64) for i in subsets(range(model.num_tail_groups), size)]
    # A prior that is not diagonal takes two sets, which then both have a gradient.
    for i, j in zip(sets, sets, strict=True) if size > 1 else itertools.product(sets, sets):
        first = Sample(model, i, sparse=False)
        second = first if i is j else Sample(model, j, sparse=False)
        known, _ = latent.evaluate(model, first, second)
        if kind == "gaussian":
            term = gaussian_term(model, rows, first, first, known)
        else:
            labels = replace(rows, target=(rows.target > 0).double(), noise=None)
            term = -2 * site_bound(LOGISTIC, model, labels, first, known)
        gradients = torch.autograd.grad(term, parameters, allow_unused=True)
        zero = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        found.append((term.detach(), *zero))
    return found


def averages(found: list[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.stack(part).mean(0) for part in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("k", [0, 2])
def test_known_rows_have_their_value_from_every_set_and_their_gradient_on_average(kind: str, size: int, k: int) -> None:
    model, x, y = fourier_problem(n=5, m=8, num_dense_columns=k)
    set_weights(model, *weights_of(8, k))
    rows = Rows(x, y, torch.zeros_like(y), torch.full_like(y, NOISE), 1.0)
    everything = known_terms(model, rows, kind, model.num_tail_groups)
    found = known_terms(model, rows, kind, size)
    for value, *_ in found:
        torch.testing.assert_close(value, everything[0][0], rtol=0, atol=1e-10)
    for ours, theirs in zip(averages(found), everything[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    everyone = Sample(model, torch.arange(model.num_tail_groups), sparse=False)
    if kind == "gaussian":
        exact = gaussian_term(model, rows, everyone, everyone)
    else:
        exact = -2 * site_bound(LOGISTIC, model, replace(rows, target=(y > 0).double(), noise=None), everyone)
    parameters = [parameter for parameter in model.weights.parameters() if parameter.numel()]
    gradients = torch.autograd.grad(exact, parameters, allow_unused=True)
    for ours, theirs in zip(everything[0], (exact.detach(), *gradients), strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=1e-10, atol=1e-12)


def test_a_gradient_of_known_rows_through_touched_features_alone_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = fourier_problem(n=5, m=8)
    set_weights(model, *weights_of(8, 0))
    rows = Rows(x, y, torch.zeros_like(y), torch.full_like(y, NOISE), 1.0)
    exact = averages(known_terms(model, rows, "gaussian", model.num_tail_groups))
    monkeypatch.setattr(model.weights, "num_tail", 2)  # a factor of one in the place of (all) / (touched)
    short = averages(known_terms(model, rows, "gaussian", 1))
    assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(short, exact, strict=True)) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prior", "k"), [("identity", 0), ("diagonal", 1), ("dense", 1)])
def test_a_sampled_diagonal_is_unbiased_for_gaussian_noise_and_a_bound_for_others(
    kind: str, prior: str, k: int
) -> None:
    model, y, _ = problem(prior, k)
    rows = rows_of(y, [0, 2])
    (exact,) = known_terms(model, rows, kind, M - k)
    found = averages(known_terms(model, rows, kind, 2))
    if kind == "gaussian":
        for ours, theirs in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    else:
        assert found[0] > exact[0] + 1e-6

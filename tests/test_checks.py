"""Counts are whole numbers, objects are no names: told when an option is given, not in the middle of a run."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.checks import check_choice, check_count, check_fraction, check_positive
from gpy_iterative.exact.probes import Rademacher
from gpy_iterative.mlls import HutchinsonMarginalLogLikelihood
from tests.exact.gaussian_models import regression

COUNTS = [
    ("rank", gpi.preconditioners.PivotedCholesky),
    ("block_size", gpi.solvers.AlternatingProjections),
    ("batch_size", gpi.solvers.StochasticGradientDescent),
    ("tile_size", gpi.linear_operators.KernelProducts),
    ("num_probes", Rademacher),
    ("num_frequencies", gpi.spectral.RandomFourierFeatures),
]


@pytest.mark.parametrize(("name", "options"), COUNTS)
def test_counts(name: str, options: Callable) -> None:
    for bad, message in ((0, "at least 1, got 0"), (-3, "got -3"), (1.5, "whole number, got 1.5"), ("4", "got '4'")):
        with pytest.raises(ValueError, match=f"{name} must be .*{message}"):
            options(**{name: bad})
    options(**{name: numpy.int64(4)})


def test_only_an_optional_count_may_be_none() -> None:
    check_count("rank", None, optional=True)
    with pytest.raises(ValueError, match="rank must be a whole number, got None"):
        check_count("rank", None)


@pytest.mark.parametrize("bad", ["mean", "", None, 1, ["median"]])  # a list has no hash
def test_choices(bad: object) -> None:
    for choices in (("median", "mode"), {"median": 1, "mode": 2}):
        check_choice("centre", "mode", choices)
        with pytest.raises(ValueError, match=f"centre must be one of median, mode, got {re.escape(repr(bad))}"):
            check_choice("centre", bad, choices)


SEEDED: dict[str, Callable] = {
    "generator of an mll": lambda seed: HutchinsonMarginalLogLikelihood(*_parts(), generator=seed)._run.generator(),
    "generator of a posterior": lambda seed: gpi.prediction.PathwisePosterior(*_parts()[::-1], generator=seed)._seed,
    "seed of a basis": lambda seed: gpi.models.RandomFourierBasis(
        kernels.RBFKernel(), num_features=4, num_dims=2, seed=seed
    ).state_dict(),
}


def _parts() -> tuple:
    case = regression(kernels.RBFKernel(), n=3)
    return case.likelihood, case.model


@pytest.mark.parametrize("name", SEEDED)
def test_seeds_are_whole_numbers(name: str) -> None:
    what = name.split()[0]
    for bad in ("a", 3.0, True, [1]):
        with pytest.raises(TypeError, match=f"{what} must be .*whole number.*, got {re.escape(repr(bad))}"):
            SEEDED[name](bad)
    with pytest.raises(ValueError, match="64 bits"):
        SEEDED[name](2**64)
    SEEDED[name](-1)
    for seed in (numpy.int64(3), numpy.uint8(3)):
        torch.testing.assert_close(_state(SEEDED[name](seed)), _state(SEEDED[name](3)), rtol=0, atol=0)


def _state(seeded: Any) -> Any:
    return seeded.get_state() if isinstance(seeded, torch.Generator) else seeded


def test_positive_numbers() -> None:
    for bad in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"mass must be positive and finite, got {bad}"):
            check_positive("mass", bad)
    check_positive("mass", 1e-300)


def test_fractions() -> None:
    for value in (0.0, 1.0):
        check_fraction("share", value, ends=True)
        with pytest.raises(ValueError, match=f"share must lie between 0 and 1, got {value}"):
            check_fraction("share", value)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"share must lie between 0 and 1, got {value}"):
            check_fraction("share", value, ends=True)


@pytest.mark.parametrize(
    ("options", "name", "bad"),
    [
        (gpi.solvers.ConjugateGradients, "tolerance", (2, "a", None)),
        (gpi.solvers.ConjugateGradients, "max_epochs", (0, "a", True)),
        (gpi.solvers.StochasticGradientDescent, "momentum", (1, "a")),
        (gpi.solvers.StochasticGradientDescent, "learning_rate", (-1, "a")),
        (gpi.linear_operators.KernelProducts, "cache_memory", (-1, "1GB")),
        (gpi.truncation.ExponentialTruncation, "rate", (-1, "a")),
    ],
)
def test_numbers(options: Callable, name: str, bad: tuple) -> None:
    for value in bad:
        with pytest.raises(ValueError, match=f"{name} must .*, got {re.escape(repr(value))}"):
            options(**{name: value})


def test_what_is_no_process_group_is_refused_before_torchrun_is_asked_for() -> None:
    with pytest.raises(TypeError, match=r"process_group must be None, 'world' or .*, got 3\."):
        gpi.linear_operators.KernelProducts(process_group=3)


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (gpi.solvers.AlternatingProjections, "fallback", "cg"),
        (gpi.solvers.ConjugateGradients, "preconditioner", 100),
    ],
)
def test_parts_of_a_solver(options: Callable, name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be None or a"):
        options(**{name: value})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("correct_diagonal", partial(gpi.probes.Preconditioned, num_probes=2)),
        ("corrected", partial(gpi.probes.RandomFeatures, num_probes=2, num_frequencies=4)),
        ("widened", partial(gpi.spectral.RandomFourierFeatures, 4)),
    ],
)
@pytest.mark.parametrize("bad", [1, "no", None])
def test_flags(name: str, options: Callable, bad: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {bad!r}"):
        options(**{name: bad})
    options(**{name: numpy.True_})


@pytest.mark.parametrize("recipe", [100, None, gpi.preconditioners.Nystrom()])
def test_probes_need_a_recipe_with_samples(recipe: object) -> None:
    with pytest.raises(TypeError, match="recipe must be a PivotedCholesky, Vecchia or LowRankPlusVecchia, got"):
        gpi.probes.Preconditioned(num_probes=2, recipe=recipe)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_learning_rates(rate: float) -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        gpi.solvers.StochasticGradientDescent(learning_rate=rate)

"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import gpytorch
import pytest
import torch

import gpy_iterative as gpi
from tests.documentation.test_readme import MyExactGP

MODULES = [name for _, name, _ in pkgutil.walk_packages(gpi.__path__, "gpy_iterative.")]
EXAMPLES = {
    test.name: test
    for name in MODULES
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    if test.examples
}

#: What a reader looks up first.
MAIN = (
    gpi.initialize_from_subsets,
    gpi.kernels.MatrixFreeKernel,
    gpi.linear_operators.KernelProducts,
    gpi.mlls.HutchinsonMarginalLogLikelihood,
    gpi.mlls.PathwiseMarginalLogLikelihood,
    gpi.mlls.RussianRouletteMarginalLogLikelihood,
    gpi.mlls.VariationalFeatureMarginalLogLikelihood,
    gpi.models.IterativeLaplaceGP,
    gpi.models.QuadruplyStochasticGP,
    gpi.prediction.PathwisePosterior,
    gpi.solvers.AlternatingProjections,
    gpi.solvers.ConjugateGradients,
)


@pytest.mark.parametrize("value", MAIN, ids=lambda value: value.__name__)
def test_what_a_reader_looks_up_first_has_an_example(value: type) -> None:
    assert f"{value.__module__}.{value.__name__}" in EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_prints_what_it_says(name: str) -> None:
    """With the names that a reader has: a model class, a likelihood, a hundred rows to learn from and twenty more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 1, generator=generator)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(120, generator=generator)
    example = EXAMPLES[name]
    example.globs = {
        "gpi": gpi,
        "gpytorch": gpytorch,
        "torch": torch,
        "MyExactGP": MyExactGP,
        "likelihood": gpytorch.likelihoods.GaussianLikelihood(),
        "train_x": x[20:],
        "train_y": y[20:],
        "test_x": x[:20],
    }
    printed: list[str] = []
    failed, tried = doctest.DocTestRunner().run(example, out=printed.append)
    assert tried > 0
    assert failed == 0, "".join(printed)

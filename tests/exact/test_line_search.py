"""A line search is seen, and nothing else is taken for one."""

import functools
import warnings
from typing import Any

import gpytorch
import pytest
import torch

import gpy_iterative as gpi
from gpy_iterative.errors import VarianceWarning
from gpy_iterative.exact.validation import LineSearchWatch
from tests.botorch_apart import fit, models
from tests.exact.gaussian_models import Case, data, regression

ITERATIVE = gpi.solvers.ConjugateGradients(tolerance=1e-4)


def seen(points: list[list[float]], dtype: torch.dtype = torch.float64) -> bool:
    """Whether a watch sees a search in these hyperparameters."""
    model, watch = torch.nn.Module(), LineSearchWatch()
    model.raw = torch.nn.Parameter(torch.zeros(len(points[0]), dtype=dtype))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for point in points:
            model.raw.data = torch.tensor(point, dtype=dtype)
            watch.see(model)
    assert len(told) <= 1
    return bool(told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_steps_back_on_a_line_are_a_search(dtype: torch.dtype) -> None:
    start, direction = torch.tensor([0.3, -1.2, 2.0]), torch.tensor([0.5, 0.1, -0.7])
    trials = [(start.double() + length * direction.double()).tolist() for length in (0, 1, 0.1, 0.4, 0.3)]
    assert not seen(trials[:3], dtype)
    assert seen([*trials[:3], [5.0, 6.0, 7.0], *trials], dtype)
    assert seen(trials, dtype)


@pytest.mark.parametrize(
    "points",
    [
        [[0.0, 0.0], [1.0, 2.0], [2.0, 4.0], [4.0, 8.0], [5.0, 10.0]],  # on and on
        [[0.0, 0.0], [1.0, 2.0], [0.5, 1.1], [0.9, 1.8], [0.6, 1.3]],  # back, beside the line
        [[0.0, 1.0], [2.0, 1.0], [1.0, 1.0], [1.5, 1.0], [1.2, 1.0]],  # one hyperparameter moves
        [[1.0, 2.0]] * 5,
    ],
)
def test_what_is_no_search(points: list[list[float]]) -> None:
    assert not seen(points)


def matern_case() -> Case:
    return regression(gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=3)), n=20)


def minimise(mll: Any, case: Case, optimizer: torch.optim.Optimizer, steps: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = -mll(case.model(case.x), case.y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


NOISY = {
    "hutchinson": functools.partial(
        gpi.mlls.HutchinsonMarginalLogLikelihood, solver=ITERATIVE, probes="rademacher", num_probes=4
    ),
    "pathwise": functools.partial(
        gpi.mlls.PathwiseMarginalLogLikelihood, solver=ITERATIVE, num_probes=4, num_frequencies=20
    ),
    "roulette": functools.partial(gpi.mlls.RussianRouletteMarginalLogLikelihood, resample=False),
    "features": gpi.mlls.RFFMarginalLogLikelihood,
}
SMOOTH = {
    "cholesky": gpi.mlls.HutchinsonMarginalLogLikelihood,
    "frozen features": functools.partial(gpi.mlls.RFFMarginalLogLikelihood, resample=False),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The variance of the truncated solve")
@pytest.mark.parametrize("name", NOISY)
def test_lbfgs_on_separate_estimates_warns_once(name: str) -> None:
    case = matern_case()
    mll = NOISY[name](case.likelihood, case.model, generator=0)
    optimizer = torch.optim.LBFGS(case.model.parameters(), max_iter=12, line_search_fn="strong_wolfe")
    with pytest.warns(VarianceWarning, match="as in a line search") as record:
        minimise(mll, case, optimizer, 1)
    assert sum("line search" in str(warning.message) for warning in record) == 1


@pytest.mark.parametrize("name", SMOOTH)
def test_lbfgs_on_a_smooth_function_does_not(name: str) -> None:
    case = matern_case()
    mll = SMOOTH[name](case.likelihood, case.model, generator=0)
    minimise(mll, case, torch.optim.LBFGS(case.model.parameters(), max_iter=12, line_search_fn="strong_wolfe"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.Adam, lr=0.3),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.SGD, lr=0.1),
    ],
    ids=["adam", "momentum", "gradient descent"],
)
def test_steps_do_not_warn(optimizer: Any) -> None:
    case = matern_case()
    mll = NOISY["hutchinson"](case.likelihood, case.model, generator=0)
    minimise(mll, case, optimizer(case.model.parameters()), 40)


def test_botorchs_default_says_why_it_is_no_good() -> None:
    x, y = data(30)
    model = models.SingleTaskGP((x + 2) / 4, y.unsqueeze(-1))
    mll = NOISY["pathwise"](model.likelihood, model, generator=0)
    with pytest.warns(VarianceWarning, match="optimizer=fit_gpytorch_mll_torch"):
        fit.fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 6}})

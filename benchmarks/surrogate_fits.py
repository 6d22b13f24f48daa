"""Fits of BoTorch's surrogate models. Only for a process of its own: importing BoTorch changes GPyTorch's settings."""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gpytorch
import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import MixedSingleTaskGP, MultiTaskGP, SingleTaskGP
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.test_functions import Ackley, Branin, Hartmann, Levy, Rosenbrock, SyntheticTestFunction
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.cases.surrogates import AVERAGE_INFORMATION, LBFGS, MIXED, MULTITASK, SINGLE
from benchmarks.runner import Outcome
from gpy_iterative.botorch import fit_average_information

OPTIMIZERS = {
    LBFGS: (gpytorch.mlls.ExactMarginalLogLikelihood, fit_gpytorch_mll_scipy),
    AVERAGE_INFORMATION: (gpi.mlls.HutchinsonMarginalLogLikelihood, fit_average_information),
}
#: Standard deviation of the noise, relative to that of the function's values.
NOISE = 0.05
SEEDS = 2


def functions() -> list[SyntheticTestFunction]:
    return [Branin(), Hartmann(dim=6), Levy(dim=10), Ackley(dim=20), Rosenbrock(dim=8)]


def observed(function: SyntheticTestFunction, num_data: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the unit cube [num_data, d], for the function's box, and noisy values [num_data, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_data, function.dim, generator=generator, dtype=torch.float64)
    assert isinstance(function.bounds, Tensor)
    low, high = function.bounds.double()
    values = function(low + (high - low) * x).unsqueeze(-1)
    return x, values + NOISE * values.std() * torch.randn(num_data, 1, generator=generator, dtype=torch.float64)


def multitask(x: Tensor, y: Tensor) -> MultiTaskGP:
    """Half of the data of another task: the function plus a trend."""
    task = (torch.arange(len(x)) % 2).to(x).unsqueeze(-1)
    return MultiTaskGP(torch.cat([x, task], -1), y + 0.3 * y.std() * task * x[:, :1], task_feature=-1)


def mixed(x: Tensor, y: Tensor) -> MixedSingleTaskGP:
    """The first input rounded to two categories."""
    category = x[:, :1].round()
    return MixedSingleTaskGP(torch.cat([category, x[:, 1:]], -1), y, cat_dims=[0])


MODELS: dict[str, Callable[[Tensor, Tensor], gpytorch.models.ExactGP]] = {
    SINGLE: SingleTaskGP,
    MULTITASK: multitask,
    MIXED: mixed,
}


def fitted(*, optimizer: str, model: str, rows: int) -> Outcome:
    """Of each fit: seconds, the exact value with priors at the end in total nats, and what L-BFGS gains from there."""
    mll_class, fit = OPTIMIZERS[optimizer]
    fits = []
    for function in functions():
        for seed in range(SEEDS):
            surrogate = MODELS[model](*observed(function, rows, seed))
            torch.manual_seed(seed)  # BoTorch draws new initial values after a fit that failed
            start = time.perf_counter()
            with quiet():
                fit_gpytorch_mll(mll_class(surrogate.likelihood, surrogate), optimizer=fit)
            seconds, value = time.perf_counter() - start, exact_value(surrogate)
            go_on(surrogate)
            left = exact_value(surrogate) - value
            fits.append({"function": type(function).__name__, "seconds": seconds, "value": value, "left": left})
    return {"fits": fits}


def go_on(model: gpytorch.models.ExactGP) -> None:
    """L-BFGS from where the model is; where that fails, the model stays there."""
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    before = copy.deepcopy(mll.state_dict())
    with quiet():
        try:
            fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_scipy, max_attempts=1)
        except ModelFittingError:
            mll.load_state_dict(before)


@contextmanager
def quiet() -> Iterator[None]:
    """BoTorch tells each line search that ended early."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def exact_value(model: gpytorch.models.ExactGP) -> float:
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    inputs, targets = model.train_inputs, model.train_targets
    with gpytorch.settings.max_cholesky_size(len(targets) + 1):
        return mll(model(*inputs), targets, *inputs).item() * len(targets)

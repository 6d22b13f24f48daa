"""BoTorch's `fit_gpytorch_mll` on its own models, with only the marginal log likelihood swapped."""

import copy
import functools
from typing import Any

import gpytorch
import pytest
import torch
from torch import Tensor

import gpy_iterative as gpi
from tests.botorch_apart import fit, models, optim, paths, transforms
from tests.exact.gaussian_models import data
from tests.exact.prediction.test_posterior import held_out_points

N = 25
ADAM = {
    "optimizer": optim.fit_gpytorch_mll_torch,
    "optimizer_kwargs": {
        "step_limit": 15,
        "stopping_criterion": None,
        "optimizer": functools.partial(torch.optim.Adam, lr=0.01),
    },
}


def _with_task(x: Tensor) -> Tensor:
    return torch.cat([x, (torch.arange(x.shape[0]) % 2).unsqueeze(-1).to(x)], dim=-1)


def model_of(name: str) -> tuple[Any, Tensor]:
    """A model and test inputs."""
    x, y = data(N)
    x, held_out = (x + 2) / 4, (held_out_points(5) + 2) / 4  # the unit cube
    y, test = y.unsqueeze(-1) + 0.3 * torch.sin(50 * torch.arange(N)).unsqueeze(-1), held_out
    torch.manual_seed(0)  # task matrices start at random
    if name == "single":
        return models.SingleTaskGP(x, y, input_transform=transforms.Normalize(3)), test
    if name == "two-outputs":
        return models.SingleTaskGP(x, torch.cat([y, y.flip(0)], dim=-1), input_transform=transforms.Normalize(3)), test
    if name == "fixed-noise":
        return models.SingleTaskGP(x, y, train_Yvar=torch.full_like(y, 0.1)), test
    return models.MultiTaskGP(_with_task(x), y, task_feature=-1), _with_task(test)


MODELS = ["single", "two-outputs", "fixed-noise", "multitask"]


def exact_value(model: Any) -> float:
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model).train()
    params = () if isinstance(model.likelihood, gpytorch.likelihoods.GaussianLikelihood) else (*model.train_inputs,)
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        value = mll(model(*model.train_inputs), model.train_targets, *params).sum().item()
    mll.eval()
    return value


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, ADAM], ids=["lbfgs", "adam"])
def test_exact_path_ends_where_gpytorch_ends(name: str, options: dict[str, Any]) -> None:
    ends = []
    for mll_class in (gpytorch.mlls.ExactMarginalLogLikelihood, gpi.mlls.PathwiseMarginalLogLikelihood):
        model, test = model_of(name)
        mll = mll_class(model.likelihood, model)
        with gpytorch.settings.fast_computations(False, False, False):
            fit.fit_gpytorch_mll(mll, **options)
            stock = model.posterior(test)
            ends.append((exact_value(model), stock.mean.detach(), stock.variance.detach()))
    (value, mean, variance), ours = ends
    assert abs(ours[0] - value) < 1e-4
    torch.testing.assert_close(ours[1], mean, rtol=0, atol=5e-3)
    torch.testing.assert_close(ours[2], variance, rtol=0.05, atol=1e-3)
    mll.posterior()
    installed = model.posterior(test)
    torch.testing.assert_close(installed.mean.detach(), ours[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(installed.variance.detach(), ours[2], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_iterative_solver_improves_the_fit(name: str) -> None:
    model, _ = model_of(name)
    before = exact_value(model)
    solver = gpi.solvers.ConjugateGradients(tolerance=1e-4)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver, num_probes=256, generator=0)
    fit.fit_gpytorch_mll(mll, **ADAM)
    assert mll.report.status is gpi.solvers.SolveStatus.CONVERGED
    assert exact_value(model) > before


@pytest.mark.parametrize("name", MODELS[:3])  # tasks of 25 data have several optima
def test_average_information_ends_no_lower_than_l_bfgs(name: str) -> None:
    values = []
    for optimizer in (optim.fit_gpytorch_mll_scipy, paths.fit_average_information):
        model, _ = model_of(name)
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
        fit.fit_gpytorch_mll(mll, optimizer=optimizer)
        assert not mll.training
        values.append(N * exact_value(model))
    assert values[1] > values[0] - 0.1


def test_results_of_average_information() -> None:
    model, _ = model_of("single")
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
    stopped = paths.fit_average_information(mll, max_steps=1)
    assert (stopped.step, stopped.status.name) == (1, "STOPPED")
    done = paths.fit_average_information(mll)
    assert done.status.name == "SUCCESS"
    assert done.fval == pytest.approx(-exact_value(model), abs=1e-6)
    with pytest.raises(ValueError, match="leave closure="):
        fit.fit_gpytorch_mll(mll, closure=lambda: None, optimizer=paths.fit_average_information)
    with pytest.raises(ValueError, match="no options of SciPy"):
        paths.fit_average_information(mll, options={"maxiter": 200})


def test_model_list_ends_where_gpytorch_ends() -> None:
    """Every member by itself, through `SumMarginalLogLikelihood(mll_cls=...)`."""
    ends = []
    for mll_class in (gpytorch.mlls.ExactMarginalLogLikelihood, gpi.mlls.HutchinsonMarginalLogLikelihood):
        members, test = zip(*(model_of(name) for name in ("single", "fixed-noise")), strict=True)
        model = models.ModelListGP(*members)
        mll = gpytorch.mlls.SumMarginalLogLikelihood(model.likelihood, model, mll_cls=mll_class)
        with gpytorch.settings.fast_computations(False, False, False):
            fit.fit_gpytorch_mll(mll)
            ends.append((sum(map(exact_value, members)), model.posterior(test[0]).mean.detach()))
    assert abs(ends[0][0] - ends[1][0]) < 1e-4
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=0, atol=5e-3)


def test_the_posterior_of_a_model_that_transforms_its_inputs() -> None:
    """Its training inputs are others in train mode than in evaluation mode, and BoTorch passes them to the likelihood."""
    model, held_out = model_of("single")
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
    fit.fit_gpytorch_mll(mll)
    expected = model(model.transform_inputs(held_out)).mean
    model.train()
    mll(model(*model.train_inputs), model.train_targets, *model.train_inputs)
    posterior = mll.posterior()
    torch.testing.assert_close(posterior(model.transform_inputs(held_out)).mean, expected, rtol=1e-3, atol=1e-3)
    grown = model.condition_on_observations(held_out, torch.zeros(len(held_out), 1, dtype=torch.float64))
    assert grown.posterior(held_out).mean.abs().max() < model.posterior(held_out).mean.abs().max()
    copy.deepcopy(mll)


def test_a_training_state_belongs_to_the_inputs_before_their_transform() -> None:
    model, _ = model_of("single")
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
    state = mll.training_state()
    model.eval()
    mll.load_training_state(state)
    state = mll.training_state()
    model.train()
    mll.load_training_state(state)
    (inputs,) = model.train_inputs
    model.set_train_data(inputs.flip(-2), model.train_targets, strict=False)
    with pytest.raises(ValueError, match="the training data are others"):
        mll.load_training_state(state)

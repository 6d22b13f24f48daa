"""Starts from subsets: the average of their fits, in place at the end, and not before."""

import copy
from functools import partial

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpy_iterative.errors import NonFiniteError
from gpy_iterative.exact.initialization import initialize_from_subsets
from gpy_iterative.mlls import HutchinsonMarginalLogLikelihood
from gpy_iterative.solvers import ConjugateGradients
from tests.exact.gaussian_models import CASES, Case, Regression, data, regression


def values(case: Case) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in case.model.named_parameters()}


def fitted(case: Case, steps: int) -> dict[str, torch.Tensor]:
    model, likelihood = copy.deepcopy((case.model, case.likelihood))
    model.train()
    mll = ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-mll(model(case.x), case.y)).backward()
        optimizer.step()
    return values(Case(model, likelihood, case.x, case.y))


@pytest.mark.parametrize("mll_class", [ExactMarginalLogLikelihood, HutchinsonMarginalLogLikelihood])
def test_a_subset_of_all_is_the_fit_to_all(mll_class: type) -> None:
    case = CASES["matern-3/2"]()
    wanted = fitted(case, 15)
    initialize_from_subsets(case.model, case.likelihood, 10_000, 2, optimizer_steps=15, mll_class=mll_class)
    for name, value in values(case).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-6)


def test_average_is_taken_in_the_constrained_space() -> None:
    case = regression(kernels.ScaleKernel(kernels.RBFKernel()), n=60)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Recorded(ExactMarginalLogLikelihood):
        def __init__(self, likelihood, model):
            super().__init__(likelihood, model)
            found.append((likelihood.raw_noise, model.train_inputs[0]))

    initialize_from_subsets(case.model, case.likelihood, 12, 3, optimizer_steps=5, mll_class=Recorded)
    assert [inputs.shape for _, inputs in found] == [(12, 3)] * 3
    constraint = case.likelihood.noise_covar.raw_noise_constraint
    noises = torch.stack([constraint.transform(raw) for raw, _ in found]).detach()
    assert noises.std() > 1e-4
    torch.testing.assert_close(case.likelihood.noise.detach(), noises.mean(0))


def test_subsets_are_neighbourhoods() -> None:
    case = regression(kernels.RBFKernel(), n=60)
    found: list[torch.Tensor] = []

    class Recorded(ExactMarginalLogLikelihood):
        def __init__(self, likelihood, model):
            super().__init__(likelihood, model)
            found.append(model.train_inputs[0])

    initialize_from_subsets(case.model, case.likelihood, 10, 2, optimizer_steps=1, mll_class=Recorded)
    x = (case.x - case.x.mean(0)) / case.x.std(0, correction=0)
    distances = (x[:, None] - x[None]).square().sum(-1)
    nearest = distances.topk(10, largest=False).indices.sort().values
    for subset in found:
        assert any(torch.equal(subset, case.x[rows]) for rows in nearest)


def test_draws_come_from_the_generator() -> None:
    results = []
    for seed in (0, 0, 1):
        case = regression(kernels.RBFKernel(), n=60)
        generator = torch.Generator().manual_seed(seed)
        initialize_from_subsets(case.model, case.likelihood, 8, 2, generator, optimizer_steps=3)
        results.append(case.likelihood.noise.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0], results[2])


def test_columns_that_are_constant_in_a_subset() -> None:
    """Two clusters far apart in ten columns that are constant in each; one further column varies in one of them."""
    x, y = data(40)
    second = (torch.arange(40) >= 20).double().unsqueeze(-1)
    x = torch.cat([x[:, :1], x[:, 1:2] * second, second.expand(40, 10)], dim=-1)
    likelihood = GaussianLikelihood()
    model = Regression(x, y, likelihood, kernels.RBFKernel(ard_num_dims=12)).double()
    start = model.covar_module.lengthscale.detach().clone()[0]
    wanted = []
    for rows in (slice(0, 20), slice(20, 40)):
        part = copy.deepcopy(model)
        part.set_train_data(x[rows], y[rows], strict=False)
        raw = fitted(Case(part, part.likelihood, x[rows], y[rows]), 10)["covar_module.raw_lengthscale"]
        wanted.append(model.covar_module.raw_lengthscale_constraint.transform(raw)[0])
    generator = torch.Generator().manual_seed(0)
    clusters = {int(torch.randint(40, (), generator=generator)) >= 20 for _ in range(2)}
    assert clusters == {False, True}, "the seed must draw one centre from each cluster"
    initialize_from_subsets(model, likelihood, 20, 2, torch.Generator().manual_seed(0), optimizer_steps=10)
    found = model.covar_module.lengthscale.detach()[0]
    torch.testing.assert_close(found[0], (wanted[0][0] + wanted[1][0]) / 2)
    torch.testing.assert_close(found[1], wanted[1][1])
    assert (found[1] - start[1]).abs() > 0.05
    assert torch.equal(found[2:], start[2:])


def test_fixed_noise_follows_the_subset() -> None:
    x, y = data()
    likelihood = FixedNoiseGaussianLikelihood(noise=torch.linspace(0.05, 0.3, 40).double())
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    initialize_from_subsets(model, likelihood, 10, 2, optimizer_steps=2)
    assert likelihood.noise.shape == (40,)


@pytest.mark.parametrize("name", ["batch", "multitask", "deep"])
def test_other_models(name: str) -> None:
    case = CASES[name]()
    before = values(case)
    initialize_from_subsets(case.model, case.likelihood, 10, 2, optimizer_steps=2)
    assert any(not torch.equal(value, before[key]) for key, value in values(case).items())


def test_large_subsets_are_iterative() -> None:
    case = CASES["matern-3/2"]()
    solver = ConjugateGradients(tolerance=1e-6)
    mll_class = partial(HutchinsonMarginalLogLikelihood, solver=solver, generator=0)
    before = values(case)
    initialize_from_subsets(case.model, case.likelihood, 20, 1, optimizer_steps=2, mll_class=mll_class)
    assert any(not torch.equal(value, before[key]) for key, value in values(case).items())


def test_the_model_is_untouched_by_an_error() -> None:
    case = CASES["matern-3/2"]()
    before, targets = values(case), case.model.train_targets
    calls = []

    class Failing(ExactMarginalLogLikelihood):
        def forward(self, function_dist, target, *params):
            calls.append(None)
            result = super().forward(function_dist, target, *params)
            return result * torch.nan if len(calls) == 4 else result

    with pytest.raises(NonFiniteError, match="has not been changed"):
        initialize_from_subsets(case.model, case.likelihood, 10, 2, optimizer_steps=2, mll_class=Failing)
    for name, value in values(case).items():
        assert torch.equal(value, before[name])
    assert case.model.train_targets is targets


@pytest.mark.parametrize(
    ("option", "value"), [("subset_size", 0), ("num_subsets", 0), ("optimizer_steps", 0), ("learning_rate", 0.0)]
)
def test_bad_options(option: str, value: float) -> None:
    case = CASES["rbf"]()
    with pytest.raises(ValueError, match=f"{option} must be"):
        initialize_from_subsets(case.model, case.likelihood, **{option: value})


def test_models_without_data() -> None:
    likelihood = GaussianLikelihood()
    model = Regression(*data(5), likelihood, kernels.RBFKernel())
    model.set_train_data(torch.zeros(2, 5, 3), torch.zeros(2, 5), strict=False)
    with pytest.raises(ValueError, match=r"\(2, 5, 3\)"):
        initialize_from_subsets(model, likelihood)
    model.train_inputs = model.train_targets = None
    with pytest.raises(ValueError, match="no training data"):
        initialize_from_subsets(model, likelihood)
    assert gpytorch.settings.debug.on()


def test_a_seed_is_as_good_as_a_generator() -> None:
    fitted = []
    for generator in (3, torch.Generator().manual_seed(3)):
        case = regression(kernels.RBFKernel(), n=20)
        initialize_from_subsets(
            case.model, case.likelihood, subset_size=8, num_subsets=2, generator=generator, optimizer_steps=2
        )
        fitted.append([parameter.clone() for parameter in case.model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*fitted, strict=True))


def test_nan_inputs_are_named() -> None:
    case = regression(kernels.RBFKernel(), n=20)
    case.model.train_inputs[0][4, 1] = torch.nan
    with pytest.raises(ValueError, match=r"train_inputs\[4, 1\] is nan"):
        initialize_from_subsets(case.model, case.likelihood, subset_size=8, num_subsets=1)


def test_the_model_meets_no_more_rows_than_a_subset_has(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(60)
    likelihood = GaussianLikelihood().double()
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    sizes: list[int] = []
    forward = gpytorch.means.ConstantMean.forward
    monkeypatch.setattr(
        gpytorch.means.ConstantMean, "forward", lambda mean, x: sizes.append(len(x)) or forward(mean, x)
    )
    initialize_from_subsets(model, likelihood, subset_size=10, num_subsets=2, optimizer_steps=2, generator=0)
    assert set(sizes) == {10}

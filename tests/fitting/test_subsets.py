"""Starts from subsets: the optima of parts of the data, combined by their information, in place at the end."""

import copy

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.likelihoods import BernoulliLikelihood, FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.fitting import subsets
from gpy_iterative.fitting.subsets import initialize_from_subsets
from gpy_iterative.mlls import HutchinsonMarginalLogLikelihood
from tests.exact.gaussian_models import CASES, Case, Regression, data, regression


def values(case: Case) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in case.model.named_parameters()}


def position(case: Case) -> Tensor:
    """The hyperparameters as `fit` knows them."""
    return gpi.fitting.AverageInformation(HutchinsonMarginalLogLikelihood(case.likelihood, case.model)).point.position


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, position and information of each subset's optimum."""
    recorded, climbed = [], subsets._climbed

    def record(mll, generator):
        result = climbed(mll, generator)
        recorded.append((mll.model.train_inputs[0], result.point.position, result.assess().matrix))
        return result

    monkeypatch.setattr(subsets, "_climbed", record)
    return recorded


@pytest.mark.parametrize(("many", "size"), [(61, 20), (60, 30)])
def test_subsets_of_many_data_are_larger(
    many: int, size: int, found: list[tuple[Tensor, Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SUBSET_SIZE", 20), ("LARGE_SUBSET_SIZE", 30), ("MANY_DATA", many)):
        monkeypatch.setattr(subsets, name, value)
    case = regression(kernels.MaternKernel(), 60)
    initialize_from_subsets(case.model, case.likelihood, num_subsets=1)
    assert len(found[0][0]) == size


def test_a_subset_of_all_is_the_fit_to_all() -> None:
    case, other = CASES["matern-3/2"](), CASES["matern-3/2"]()
    gpi.fit(HutchinsonMarginalLogLikelihood(other.likelihood, other.model), progress=False)
    initialize_from_subsets(case.model, case.likelihood, 10_000, 1)
    points = [
        gpi.fitting.AverageInformation(HutchinsonMarginalLogLikelihood(each.likelihood, each.model)).point
        for each in (case, other)
    ]
    assert points[1].value - points[0].value < 1.5
    relevant = torch.arange(6) != 4  # the others, as the lengthscale that is still noticed has not gone to infinity
    assert 2 < points[0].position[4] < points[1].position[4]
    torch.testing.assert_close(points[0].position[relevant], points[1].position[relevant], rtol=0.2, atol=0.3)


def test_optima_are_weighted_by_their_information(found: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    case = regression(kernels.ScaleKernel(kernels.RBFKernel()), n=90)
    initialize_from_subsets(case.model, case.likelihood, 30, 3)
    total = sum(information for _, _, information in found)
    expected = torch.linalg.inv(total) @ sum(information @ optimum for _, optimum, information in found)
    optima = torch.stack([optimum for _, optimum, _ in found])
    assert optima.std(0).max() > 1e-3
    torch.testing.assert_close(position(case), expected.clamp(optima.amin(0), optima.amax(0)), rtol=1e-6, atol=1e-6)


def test_irrelevant_inputs_of_subsets_are_noticed(found: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    x, likelihood = torch.randn(80, 3, generator=torch.Generator().manual_seed(0)).double(), GaussianLikelihood()
    y = x[:, 0].sin() + 0.1 * torch.randn(80, generator=torch.Generator().manual_seed(1)).double()
    model = Regression(x, y, likelihood, kernels.MaternKernel(nu=1.5, ard_num_dims=3)).double()
    best = 80 * gpi.fit(HutchinsonMarginalLogLikelihood(likelihood, model), progress=False).history[-1].value
    model.covar_module.lengthscale = 1.0
    initialize_from_subsets(model, likelihood, 80, 1)
    far, near = found[0][1][2:].exp(), model.covar_module.lengthscale.detach()[0]
    mll = HutchinsonMarginalLogLikelihood(likelihood, model)
    optimiser = gpi.fitting.AverageInformation(mll)
    information = dict(zip(optimiser.coordinates.names, optimiser.assess().curvature.matrix.diagonal(), strict=True))
    assert (far[1:] > 100).all()
    assert (near[1:] < far[1:] / 3).all()
    for number in (1, 2):
        assert 0.1 < information[f"covar_module.lengthscale[{number}]"] < 1
    assert best - optimiser.point.value < 1.5
    torch.testing.assert_close(near[0], far[0], rtol=0.2, atol=0)


def test_half_of_a_subset_is_a_neighbourhood(found: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    case = regression(kernels.RBFKernel(), n=60)
    initialize_from_subsets(case.model, case.likelihood, 10, 2)
    x = (case.x - case.x.mean(0)) / case.x.std(0, correction=0)
    distances = (x[:, None] - x[None]).square().sum(-1)
    nearest = distances.topk(5, largest=False).indices
    assert len(found) == 2
    for inputs, _, _ in found:
        rows = {int((case.x == row).all(-1).nonzero()) for row in inputs}
        assert len(rows) == 10
        assert any(rows.issuperset(one.tolist()) for one in nearest)


@pytest.mark.parametrize("second", [3, torch.Generator().manual_seed(3), 4], ids=["seed", "generator", "another seed"])
def test_draws_come_from_the_generator(second: int | torch.Generator) -> None:
    results = []
    for generator in (3, second):
        case = regression(kernels.RBFKernel(), n=60)
        initialize_from_subsets(case.model, case.likelihood, 12, 2, generator)
        results.append(case.likelihood.noise.detach())
    assert torch.equal(*results) == (second != 4)


def test_constant_columns_keep_their_lengthscale() -> None:
    x, y = data(40)
    likelihood = GaussianLikelihood()
    model = Regression(
        torch.cat([x[:, :1], torch.ones(40, 3).double()], dim=-1), y, likelihood, kernels.RBFKernel(ard_num_dims=4)
    ).double()
    start = model.covar_module.lengthscale.detach().clone()[0]
    initialize_from_subsets(model, likelihood, 20, 2)
    lengthscale = model.covar_module.lengthscale.detach()[0]
    assert (lengthscale[0] - start[0]).abs() > 0.05
    torch.testing.assert_close(lengthscale[1:], start[1:], rtol=1e-6, atol=0)


def test_fixed_noise_follows_the_subset() -> None:
    x, y = data()
    likelihood = FixedNoiseGaussianLikelihood(noise=torch.linspace(0.05, 0.3, 40).double())
    model = Regression(x, y, likelihood, kernels.RBFKernel()).double()
    before = model.covar_module.raw_lengthscale.detach().clone()
    initialize_from_subsets(model, likelihood, 20, 2)
    assert likelihood.noise.shape == (40,)
    assert not torch.equal(model.covar_module.raw_lengthscale, before)


@pytest.mark.parametrize("name", ["batch", "multitask"])
def test_other_models(name: str) -> None:
    case = CASES[name]()
    before = values(case)
    initialize_from_subsets(case.model, case.likelihood, 15, 2)
    assert any(not torch.equal(value, before[key]) for key, value in values(case).items())


def test_models_without_average_information_are_refused() -> None:
    case = CASES["deep"]()
    with pytest.raises(ValueError, match=r"belongs to a network.*start='current'"):
        initialize_from_subsets(case.model, case.likelihood, 10, 2)
    with pytest.raises(ValueError, match="BernoulliLikelihood"):
        initialize_from_subsets(case.model, BernoulliLikelihood(), 10, 2)


def test_the_model_is_untouched_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["matern-3/2"]()
    before, targets, calls = values(case), case.model.train_targets, []
    climbed = subsets._climbed

    def failing(mll, generator):
        calls.append(None)
        if len(calls) == 2:
            raise NonFiniteError("a value")
        return climbed(mll, generator)

    monkeypatch.setattr(subsets, "_climbed", failing)
    with pytest.raises(NonFiniteError):
        initialize_from_subsets(case.model, case.likelihood, 10, 2)
    for name, value in values(case).items():
        assert torch.equal(value, before[name])
    assert case.model.train_targets is targets


class TwoInputs(Regression):
    def forward(self, left: Tensor, right: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return super().forward(torch.cat([left, right], dim=-1))


def test_inputs_in_two_tensors_have_the_subsets_of_one() -> None:
    x, y = data(60)
    ends = []
    for kind, inputs in ((Regression, x), (TwoInputs, (x[:, :1], x[:, 1:]))):
        likelihood = GaussianLikelihood()
        model = kind(inputs, y, likelihood, kernels.RBFKernel()).double()
        initialize_from_subsets(model, likelihood, subset_size=20, num_subsets=2, generator=0)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.parametrize("option", ["subset_size", "num_subsets"])
def test_bad_options(option: str) -> None:
    case = CASES["rbf"]()
    with pytest.raises(ValueError, match=f"{option} must be"):
        initialize_from_subsets(case.model, case.likelihood, **{option: 0})


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
    initialize_from_subsets(model, likelihood, subset_size=10, num_subsets=2, generator=0)
    assert set(sizes) == {2, 10}  # two rows tell whether there is average information


def test_mode_and_copies_are_left(found: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    case = CASES["rbf"]()
    case.model.eval()
    other = copy.deepcopy(case.model)
    initialize_from_subsets(case.model, case.likelihood, 10, 2)
    assert not case.model.training
    assert not case.likelihood.training
    assert torch.equal(case.model.train_inputs[0], other.train_inputs[0])

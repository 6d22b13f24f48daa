"""The file that a fit goes on from."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpy_iterative as gpi
from gpy_iterative.fitting import checkpoint
from gpy_iterative.fitting.steps.adam import AdamSteps
from tests.exact.gaussian_models import CASES, Regression
from tests.fitting.problems import ITERATIVE, data, features, quiet, regression
from tests.laplace.cases import Exposed, LaplaceModel


@pytest.mark.parametrize("solver", [None, ITERATIVE], ids=["exact", "iterative"])
@pytest.mark.parametrize("method", ["average_information", "adam"])
def test_a_resumed_fit_is_the_same(method: Any, solver: gpi.solvers.Solver | None, tmp_path: Path) -> None:
    file, steps = tmp_path / "run.pt", 6
    whole, first, second = (regression(120, solver=solver) for _ in range(3))
    expected = quiet(whole, method=method, max_steps=steps, generator=1)
    done = 0

    def kill(row: gpi.fitting.HistoryRow) -> None:
        nonlocal done
        done += 1
        if done == 4:
            raise SystemExit

    with pytest.raises(SystemExit):
        quiet(first, method=method, max_steps=steps, checkpoint=file, generator=1, callback=kill)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    resumed = quiet(second, method=method, max_steps=steps, checkpoint=file, generator=1)
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    told = lambda result: [(row.step, row.value, row.left_to_gain, row.step_length) for row in result.history]
    assert told(resumed) == told(expected)
    assert resumed.status is expected.status


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_fit_resumed_beside_its_last_step_by_average_information_is_the_same(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpy_iterative.fitting.loops.FOLLOWED_AFTER", 2)
    file = tmp_path / "run.pt"
    whole, first, second = (regression(120) for _ in range(3))
    expected = quiet(whole)
    assert expected.steps > 4
    quiet(first, max_steps=steps, checkpoint=file)
    resumed = quiet(second, checkpoint=file)
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    assert [replace(row, seconds=0.0) for row in resumed.history] == [
        replace(row, seconds=0.0) for row in expected.history
    ]
    assert resumed.hyperparameters == expected.hyperparameters


def test_a_budget_that_is_called_again_ends_alike_and_goes_on_when_raised(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    whole, first, again, raised = (regression(100, solver=ITERATIVE) for _ in range(4))
    ends = [quiet(mll, max_steps=1, checkpoint=file) for mll in (first, again)]
    # By the curvature before the last step, which is in the file.
    told = lambda result: [replace(row, seconds=0.0) for row in result.history]
    assert told(ends[0]) == told(ends[1])
    assert ends[0].hyperparameters == ends[1].hyperparameters
    assert told(quiet(raised, max_steps=3, checkpoint=file)) == told(quiet(whole, max_steps=3))
    assert all(map(torch.equal, whole.parameters(), raised.parameters()))


def test_a_resumed_fit_keeps_its_raised_probes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"solver": ITERATIVE, "num_probes": 2, "probes": "rademacher"}
    file, steps = tmp_path / "run.pt", 30
    whole, first, second = (regression(100, **options) for _ in range(3))
    expected = quiet(whole, max_steps=steps)
    most = len(expected.history) - 1
    seen: list[gpi.fitting.HistoryRow] = []

    def kill(row: gpi.fitting.HistoryRow) -> None:
        seen.append(row)
        if len(seen) == most:
            raise SystemExit

    with pytest.raises(SystemExit):
        quiet(first, max_steps=steps, checkpoint=file, callback=kill)
    resumed = quiet(second, max_steps=steps, checkpoint=file)
    assert [row.value for row in resumed.history] == [row.value for row in expected.history]
    assert all(map(torch.equal, whole.parameters(), second.parameters()))


def test_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    file.write_text("no checkpoint")
    mll = regression(40)
    before = [parameter.detach().clone() for parameter in mll.parameters()]
    with pytest.raises(ValueError, match=r"no checkpoint of gpi\.fit"):
        quiet(mll, checkpoint=file)
    file.unlink()
    quiet(regression(40), checkpoint=file, max_steps=1)
    with pytest.raises(ValueError, match="method='average_information'"):
        quiet(mll, checkpoint=file, method="adam")
    with pytest.raises(ValueError, match="another model"):
        quiet(regression(40, covariance=gpytorch.kernels.RBFKernel()), checkpoint=file)
    assert all(map(torch.equal, mll.parameters(), before))


class CountedKernel(gpytorch.kernels.RBFKernel):
    """A user's own kernel, which notes how often it was called."""

    calls = 0

    def forward(self, *inputs: Any, **options: Any) -> Any:
        self.calls += 1
        return super().forward(*inputs, **options)


def test_attributes_that_a_users_kernel_changes_refuse_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    quiet(regression(40, covariance=CountedKernel()), checkpoint=file, max_steps=1)
    used = regression(40, covariance=CountedKernel())
    used.model(*used.model.train_inputs).covariance_matrix.sum()
    assert used.model.covar_module.calls
    assert quiet(used, checkpoint=file, max_steps=2).steps == 2


def test_a_checkpoint_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    file, mll = tmp_path / (250 * "a"), regression(60)  # no room for the name of the temporary file beside it
    before = [parameter.detach().clone() for parameter in mll.parameters()]
    with pytest.raises(OSError, match=file.name + "'$"):
        quiet(mll, checkpoint=file)
    assert all(map(torch.equal, mll.parameters(), before))


def test_a_checkpoint_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    quiet(regression(40), checkpoint=tmp_path / "run.pt", max_steps=1)
    (tmp_path / "other").touch()
    assert (tmp_path / "run.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


OTHERS = {
    "class": (lambda: ScaleKernel(RBFKernel(ard_num_dims=3)), "covar_module.base_kernel is MaternKernel"),
    "smoothness": (lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=3)), "nu=1.5"),
    "dimensions": (lambda: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=3, active_dims=(2, 1, 0))), "active_dims"),
    "constraint": (
        lambda: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=3, lengthscale_constraint=GreaterThan(0.1))),
        "GreaterThan",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_differ_in_what_is_not_trained_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    quiet(regression(40), checkpoint=file, max_steps=1)
    kernel, message = OTHERS[name]
    mll = regression(40, covariance=kernel())
    before = {key: tensor.clone() for key, tensor in mll.state_dict().items()}
    with pytest.raises(ValueError, match=rf"another model: .*{message}"):
        quiet(mll, checkpoint=file)
    assert all(torch.equal(tensor, before[key]) for key, tensor in mll.state_dict().items())


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    quiet(regression(60), max_steps=1, checkpoint=file)
    other, generator = regression(70), torch.Generator().manual_seed(3)
    position, before = generator.get_state(), [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(ValueError, match=r"belongs to another fit.*another run"):
        quiet(other, checkpoint=file, generator=generator)
    assert torch.equal(generator.get_state(), position)
    assert all(map(torch.equal, other.parameters(), before))


class InterruptedFile:
    """A file whose write number `number` is the last."""

    def __init__(self, file: BinaryIO, number: int, error: BaseException) -> None:
        self.file, self.left, self.error = file, number, error

    def write(self, part: bytes) -> int:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.file.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "InterruptedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")], ids=["ctrl-c", "full"])
@pytest.mark.parametrize("number", [1, 4, 12])
def test_an_interrupted_write_says_what_interrupted_it(
    number: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, temporary = tmp_path / "run.pt", checkpoint._temporary_file
    checkpoint.save_whole({"weights": torch.ones(3)}, file)

    def interrupted(path: Path) -> tuple[Path, Any]:
        name, opened = temporary(path)
        return name, InterruptedFile(opened, number, error)

    monkeypatch.setattr(checkpoint, "_temporary_file", interrupted)
    with pytest.raises(type(error)):
        checkpoint.save_whole({"weights": torch.zeros(3)}, file)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert torch.equal(torch.load(file)["weights"], torch.ones(3))


# Adam


def test_a_step_of_adam_that_fails_leaves_the_optimiser() -> None:
    mll = regression(40)
    steps = AdamSteps(mll, num_steps=10)
    steps.step()
    optimizer = steps._optimizer
    before = [tensor.clone() for state in optimizer.state.values() for tensor in state.values()]
    step = optimizer.step

    def interrupted(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        raise KeyboardInterrupt

    optimizer.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        steps.step()
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(map(torch.equal, before, after))


def test_a_state_with_other_groups_of_parameters_changes_nothing() -> None:
    case = CASES["deep"]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, solver=ITERATIVE, generator=0)
    steps = AdamSteps(mll, num_steps=10)
    steps.step()
    before, state = mll.training_state(), steps.state()
    steps.step()
    moved = mll.training_state()
    assert any(not torch.equal(moved[name], before[name]) for name in before)
    with pytest.raises(ValueError, match="parameter group"):
        steps.load_state({**state, "optimizer": torch.optim.Adam(mll.parameters()).state_dict()})
    assert all(torch.equal(tensor, moved[name]) for name, tensor in mll.training_state().items())


def test_batches_go_on_where_a_pass_was_left(tmp_path: Path) -> None:
    batches = list(torch.arange(200).split(30))
    whole, parted, file = features(), features(), tmp_path / "run.pt"
    expected = quiet(whole, batches=batches, max_steps=16)

    def kill(row: gpi.fitting.HistoryRow) -> None:
        if row.step == 11:
            raise SystemExit

    with pytest.raises(SystemExit):
        quiet(parted, batches=batches, max_steps=16, checkpoint=file, callback=kill)
    resumed = quiet(features(), batches=batches, max_steps=16, checkpoint=file)
    assert [row.value for row in resumed.history] == [row.value for row in expected.history]


def test_frequencies_that_a_kernel_draws_late_are_resumed(tmp_path: Path) -> None:
    def minibatches() -> gpi.mlls.MinibatchMarginalLogLikelihood:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Regression(*data(60), likelihood, gpytorch.kernels.RFFKernel(num_samples=4)).double()
        return gpi.mlls.MinibatchMarginalLogLikelihood(likelihood, model, batch_size=20, generator=0)

    file, second = tmp_path / "run.pt", minibatches()
    first = quiet(minibatches(), max_steps=2, checkpoint=file)
    resumed = quiet(second, max_steps=3, checkpoint=file)
    assert resumed.history[:2] == first.history[:2]
    saved = torch.load(file, weights_only=True)["parameters"]["model.covar_module.randn_weights"]
    assert torch.equal(second.model.covar_module.randn_weights, saved)


@pytest.mark.parametrize("method", ["average_information", "adam"])
def test_other_trained_parameters_are_refused(method: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    quiet(regression(40), checkpoint=file, max_steps=1, method=method)
    mll = regression(40)
    mll.model.covar_module.raw_outputscale.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in mll.parameters()]
    with pytest.raises(ValueError, match="another model: trained parameters is"):
        quiet(mll, checkpoint=file, method=method)
    assert all(map(torch.equal, mll.parameters(), before))


def test_other_noise_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"

    def fit(noise: float, steps: int) -> None:
        likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((40,), noise, dtype=torch.float64))
        quiet(regression(40, likelihood=likelihood), checkpoint=file, max_steps=steps)

    fit(0.04, 1)
    with pytest.raises(ValueError, match=r"other values of likelihood.noise_covar, which is not trained"):
        fit(0.4, 2)
    fit(0.04, 2)


def test_noise_of_a_missing_target_may_be_unknown(tmp_path: Path) -> None:
    noise = torch.full((40,), 0.04, dtype=torch.float64)
    noise[3] = torch.nan
    with gpytorch.settings.observation_nan_policy("mask"):
        for steps in (1, 2):
            mll = regression(40, likelihood=gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise))
            targets = mll.model.train_targets.clone()
            targets[3] = torch.nan
            mll.model.set_train_data(targets=targets)
            assert quiet(mll, checkpoint=tmp_path / "run.pt", max_steps=steps).steps == steps


@pytest.mark.parametrize(
    "prior", [gpytorch.priors.GammaPrior, gpytorch.priors.LogNormalPrior], ids=["in the state dict", "elsewhere"]
)
def test_other_priors_are_refused(prior: type, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"

    def fit(concentration: float, steps: int) -> None:
        covariance = ScaleKernel(MaternKernel(lengthscale_prior=prior(concentration, 6.0)))
        quiet(regression(40, covariance=covariance), checkpoint=file, max_steps=steps)

    fit(3.0, 1)
    with pytest.raises(ValueError, match=r"another model: .*lengthscale_prior"):
        fit(300.0, 2)
    fit(3.0, 2)


@pytest.mark.parametrize("method", ["average_information", "adam"])
def test_other_fixed_parameters_are_refused(method: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"

    def fit(noise: float, steps: int) -> None:
        mll = regression(40)
        mll.likelihood.noise = noise
        mll.likelihood.raw_noise.requires_grad_(False)
        quiet(mll, checkpoint=file, max_steps=steps, method=method)
        assert mll.likelihood.noise.item() == pytest.approx(noise)

    fit(0.1, 1)
    with pytest.raises(ValueError, match=r"raw_noise, which is not trained"):
        fit(0.5, 2)
    fit(0.1, 2)


def test_another_number_of_probes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    fit = lambda probes: quiet(regression(60, solver=ITERATIVE, num_probes=probes), checkpoint=file, max_steps=2)
    fit(4)
    with pytest.raises(ValueError, match="num_probes is 4 in it and 8 here"):
        fit(8)
    fit(4)


def test_other_arguments_of_the_likelihood_are_refused(tmp_path: Path) -> None:
    file, (x, _) = tmp_path / "run.pt", data(40)
    exposure = 1 + 5 * x[:, 1]
    counts = torch.poisson(exposure * torch.sin(5 * x[:, 0]).exp(), generator=torch.Generator().manual_seed(0))

    def fit(params: tuple[Any, ...], steps: int) -> None:
        likelihood = Exposed()
        model = LaplaceModel(x, counts, likelihood).double()
        mll = gpi.mlls.LaplaceMarginalLogLikelihood(likelihood, model, generator=0)
        quiet(mll, checkpoint=file, max_steps=steps, params=params)

    fit((exposure,), 1)
    for params in ((10 * exposure,), ()):
        with pytest.raises(ValueError, match=r"other params="):
            fit(params, 2)
    fit((exposure,), 2)


@pytest.mark.parametrize("method", ["average_information", "adam"])
def test_a_resumed_fit_that_cannot_be_evaluated_leaves_the_parameters(method: Any, tmp_path: Path) -> None:
    file, mll = tmp_path / "run.pt", regression(40)
    quiet(regression(40), checkpoint=file, max_steps=1, method=method)
    before = [parameter.detach().clone() for parameter in mll.parameters()]
    calls = iter(range(100))
    looks = 2 if method == "average_information" else 1  # at data and method
    forward = mll.model.forward

    def failing(x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        if next(calls) >= looks - 1:
            raise gpi.errors.NonFiniteError("no")
        return forward(x)

    mll.model.forward = failing
    with pytest.raises(gpi.errors.NonFiniteError, match="no"):
        quiet(mll, checkpoint=file, max_steps=4, method=method)
    assert all(map(torch.equal, mll.parameters(), before))


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["random Fourier", "inducing points"])
def test_a_resumed_quadruply_stochastic_fit_is_the_same(basis: str, tmp_path: Path) -> None:
    file, (x, y) = tmp_path / "run.pt", data(200)

    def fit(steps: int, **options: Any) -> list[float]:
        torch.manual_seed(0)
        kernel = ScaleKernel(RBFKernel()).double().requires_grad_(False)
        models = gpi.models
        features = (
            models.RandomFourierBasis(kernel, 60, num_dims=3)
            if basis == "random Fourier"
            else models.InducingPointBasis(kernel, x[:20])
        )
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        model = models.QuadruplyStochasticGP(features).double()
        mll = gpi.mlls.QuadruplyStochasticELBO(likelihood, model, num_feature_samples=10, generator=0)
        told = quiet(mll, batches=[(x, y)], max_steps=steps, **options)
        return [row.value for row in told.history]

    def kill(row: gpi.fitting.HistoryRow) -> None:
        if row.step == 23:
            raise SystemExit

    whole = fit(40)
    with pytest.raises(SystemExit):
        fit(40, checkpoint=file, callback=kill)
    assert fit(40, checkpoint=file) == whole

"""Lengthscales that hide a gain."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel

import gpy_iterative as gpi
from gpy_iterative.fitting import FitStatus
from gpy_iterative.fitting.steps.lengthscales import shorter, typical
from tests.exact.gaussian_models import Regression
from tests.fitting.problems import ITERATIVE, LOW_RANK, quiet, regression

# Shorter ones


def unnoticed(solver: gpi.solvers.Solver | None) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    """With an input that matters, at a lengthscale where it has no effect, as after a fit to few data."""
    mll = regression(100, solver=solver)
    mll.model.covar_module.base_kernel.lengthscale = torch.tensor([1e4, 0.7, 0.7], dtype=torch.float64)
    return mll


@pytest.mark.parametrize("solver", [None, ITERATIVE], ids=["exact", "iterative"])
@pytest.mark.parametrize("is_reset", [True, False], ids=["reset at the start", "shortened at the end"])
def test_an_input_that_matters_is_noticed_from_a_huge_lengthscale(
    solver: gpi.solvers.Solver | None, is_reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the ridge hid 128 nats: CONVERGED, with an irrelevant input."""
    if not is_reset:
        monkeypatch.setattr(gpi.fitting.AverageInformation, "reset_lengthscales", lambda *_, **__: False)
    result, mll = quiet(regression(100, solver=solver)), unnoticed(solver)
    noticed = quiet(mll)
    assert noticed.status is FitStatus.CONVERGED
    assert 100 * noticed.history[-1].value == pytest.approx(100 * result.history[-1].value, abs=1.0)
    assert not any("[0]" in name for name in noticed.irrelevant)


@pytest.mark.parametrize("is_reset", [True, False], ids=["reset at the start", "shortened at the end"])
def test_a_fit_that_noticed_an_input_resumes_exactly(
    is_reset: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_reset:
        monkeypatch.setattr(gpi.fitting.AverageInformation, "reset_lengthscales", lambda *_, **__: False)
    mll, resumed = unnoticed(None), unnoticed(None)
    noticed = quiet(mll)
    rows = []

    def interrupt(row: gpi.fitting.HistoryRow) -> None:
        rows.append(row)
        if len(rows) == 2:
            raise KeyboardInterrupt

    assert quiet(resumed, checkpoint=tmp_path / "fit.pt", callback=interrupt).is_interrupted
    for steps in (noticed.steps - 1, noticed.steps):
        quiet(resumed, checkpoint=tmp_path / "fit.pt", max_steps=steps)
    assert all(torch.equal(*pair) for pair in zip(resumed.parameters(), mll.parameters(), strict=True))


def far_out(mll: gpi.mlls.HutchinsonMarginalLogLikelihood) -> gpi.fitting.AverageInformation:
    """At the best of the other hyperparameters."""
    optimiser = gpi.fitting.AverageInformation(mll)
    while optimiser.step() is not None and optimiser.assess().left > 0.01:
        pass
    return optimiser


def test_an_interrupted_look_for_large_lengthscales_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    optimiser = far_out(unnoticed(None))
    before, evaluated = optimiser.coordinates.read(), optimiser._evaluated

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimiser, "_evaluated", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimiser.shorten_lengthscales()
    assert torch.equal(optimiser.coordinates.read(), before)
    monkeypatch.setattr(optimiser, "_evaluated", evaluated)
    assert optimiser.shorten_lengthscales()
    assert not torch.equal(optimiser.coordinates.read(), before)


@pytest.mark.parametrize(("errors", "is_noticed"), [(2.5, True), (1.5, False)])
def test_a_gradient_of_two_standard_errors_is_worth_a_look(errors: float, is_noticed: bool) -> None:
    """A multitask fit ended 45 nats lower with one of 2.7."""
    optimiser = far_out(unnoticed(None))
    found = optimiser.assess()
    noisy = replace(found, samples=found.gradient.expand(3, -1) / errors)
    assert (shorter(optimiser.coordinates, optimiser.point, noisy) is not None) is is_noticed


def test_a_lengthscale_that_only_sets_outliers_apart_is_not_shortened() -> None:
    """Elevators went to 4e-13: two rows were alone at 1, where the gradient is that of entries of 1e-30."""
    mll = regression(100, solver=ITERATIVE)
    inputs, targets = mll.model.train_inputs[0].float(), mll.model.train_targets.float()
    inputs[:, 2], inputs[10, 2], inputs[20, 2], targets[10] = 0.0, 54.0, 109.0, 6.0
    mll.float()
    mll.model.set_train_data(inputs, targets, strict=False)
    mll.model.covar_module.base_kernel.lengthscale = 0.7
    optimiser = far_out(mll)
    found = optimiser.assess()
    clear = replace(found, samples=found.gradient.expand(3, -1) / 2.5)
    assert found.gradient[-1] < 0 < found.curvature.matrix[-1, -1] < 10 * found.gradient[-1].square()
    assert shorter(optimiser.coordinates, optimiser.point, clear) is None


def test_lengthscales_are_shortened_within_their_bounds() -> None:
    mll = unnoticed(None)
    kernel: Any = mll.model.covar_module.base_kernel
    kernel.register_constraint("raw_lengthscale", GreaterThan(torch.tensor([30.0, 1e-3, 1e-3]).double()))
    kernel.lengthscale = torch.tensor([1e4, 0.7, 0.7], dtype=torch.float64)
    optimiser = far_out(mll)
    assert optimiser.shorten_lengthscales()
    assert 30 < kernel.lengthscale[0, 0] < 1e3


@pytest.mark.parametrize("solver", [None, ITERATIVE], ids=["exact", "iterative"])
def test_an_irrelevant_input_is_not_noticed(solver: gpi.solvers.Solver | None) -> None:
    mll = unnoticed(solver)
    mll.model.covar_module.base_kernel.lengthscale = torch.tensor([0.7, 0.7, 1e4], dtype=torch.float64)
    optimiser = gpi.fitting.AverageInformation(mll)
    for _ in range(8):
        optimiser.step()
    before = optimiser.point.position
    assert optimiser.assess().curvature.matrix[-1, -1] < 1e-4
    assert not optimiser.shorten_lengthscales()
    assert torch.equal(optimiser.coordinates.read(), before)


# Typical ones

HIDDEN = {
    "constant": {"lengthscale": 1e4},
    "nearly linear": {"lengthscale": 1e3},
    "diagonal": {"lengthscale": 1e-4},
    "below the noise": {"lengthscale": 1e4, "outputscale": 1e-6},
    "huge noise": {"lengthscale": 1e4, "noise": 1e6},
}


def started(solver: gpi.solvers.Solver | None, start: dict[str, Any]) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    mll = regression(100, solver=solver)
    kernel = mll.model.covar_module
    kernel.base_kernel.lengthscale = torch.as_tensor(start["lengthscale"], dtype=torch.float64)
    kernel.outputscale, mll.likelihood.noise = start.get("outputscale", 0.7), start.get("noise", 0.7)
    return mll


@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.DataWarning")
@pytest.mark.parametrize("start", HIDDEN)
@pytest.mark.parametrize("solver", [None, ITERATIVE], ids=["exact", "iterative"])
def test_a_kernel_without_effect_at_the_start_is_learned(solver: gpi.solvers.Solver | None, start: str) -> None:
    """It ended CONVERGED, 68 to 120 nats below the optimum."""
    result, hidden = quiet(regression(100, solver=solver)), quiet(started(solver, HIDDEN[start]))
    assert hidden.status is FitStatus.CONVERGED
    assert 100 * hidden.history[-1].value == pytest.approx(100 * result.history[-1].value, abs=1.0)
    assert not any(f"[{number}]" in name for name in hidden.irrelevant for number in (0, 1))


def test_probes_and_preconditioner_are_those_of_the_typical_lengthscales() -> None:
    """Those of a diagonal matrix led to ten times the noise."""
    mll = started(LOW_RANK, {"lengthscale": 1e-4})
    not_drawn, optimiser = set(mll.training_state()), gpi.fitting.AverageInformation(mll)
    assert optimiser.reset_lengthscales(is_start=True)
    assert set(optimiser.point.before) == not_drawn
    assert set(optimiser.mll.training_state()) > not_drawn


def test_inputs_that_only_together_explain_something_are_noticed() -> None:
    mll = started(None, {"lengthscale": [1e4, 1e4, 0.7]})
    x = mll.model.train_inputs[0]
    noise = 0.1 * torch.randn(100, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mll.model.set_train_data(targets=torch.sin(12 * (x[:, 0] - 0.5) * (x[:, 1] - 0.5)) + noise, strict=False)
    result = quiet(mll)
    assert result.status is FitStatus.CONVERGED
    assert result.irrelevant == ("covar_module.base_kernel.lengthscale[2]",)


def test_a_fitted_model_keeps_its_irrelevant_input() -> None:
    mll = regression(100)
    quiet(mll)
    mll.model.covar_module.base_kernel.lengthscale = torch.cat(
        [mll.model.covar_module.base_kernel.lengthscale[0, :2], torch.tensor([1e4], dtype=torch.float64)]
    )
    optimiser = gpi.fitting.AverageInformation(mll)
    before = optimiser.coordinates.read()
    assert not optimiser.reset_lengthscales(is_start=True)
    assert torch.equal(optimiser.coordinates.read(), before)
    assert len(quiet(mll).history) == 1


def test_where_nothing_is_hidden_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    optimiser = gpi.fitting.AverageInformation(regression(100))
    optimiser.assess()
    monkeypatch.setattr(optimiser, "_evaluated", pytest.fail)
    assert not optimiser.reset_lengthscales(is_start=True)


def reset(kernel: Any, *, is_start: bool = False, make: type[Regression] = Regression) -> dict[str, float] | None:
    """What is reset, by name, for columns with deviations 1, 2, 0 and 4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator, dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, 0.0, 4.0]) * (x - x.mean(0)) / x.std(0, correction=0)
    y = torch.sin(x[:, 0]) + torch.randn(200, generator=generator, dtype=torch.float64)
    model = make(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
    optimiser = gpi.fitting.AverageInformation(mll)
    point, names = optimiser.point, optimiser.coordinates.names
    found = typical(optimiser.coordinates, point, optimiser.assess(), is_start=is_start)
    if found is None:
        return None
    pairs = zip(names, found, point.position, strict=True)
    return {name: float(value.exp()) for name, value, before in pairs if value != before}


def far(kernel: Any, lengthscale: Any = 1e5) -> Any:
    kernel.lengthscale = torch.as_tensor(lengthscale)
    return kernel


def test_typical_lengthscales_are_those_of_the_kernels_columns() -> None:
    assert reset(far(MaternKernel(ard_num_dims=4))) == pytest.approx(
        {"covar_module.lengthscale[0]": 2.0, "covar_module.lengthscale[1]": 4.0, "covar_module.lengthscale[3]": 8.0}
    )
    assert reset(far(RBFKernel())) == pytest.approx({"covar_module.lengthscale": 21**0.5})
    assert reset(far(RBFKernel(active_dims=[1, 3]))) == pytest.approx({"covar_module.lengthscale": 20**0.5})
    assert reset(far(RBFKernel(active_dims=[3, 1], ard_num_dims=2))) == pytest.approx(
        {"covar_module.lengthscale[0]": 32**0.5, "covar_module.lengthscale[1]": 8**0.5}
    )
    assert reset(far(RBFKernel(active_dims=[2]))) is None  # constant


def test_a_kernel_without_effect_gets_a_visible_outputscale() -> None:
    found = reset(ScaleKernel(far(RBFKernel(active_dims=[1]))))
    assert found is not None
    assert set(found) == {"covar_module.outputscale", "covar_module.base_kernel.lengthscale"}
    assert 0.06 < found["covar_module.outputscale"] < 0.14  # noise is .7
    with_line = ScaleKernel(LinearKernel() + far(RBFKernel(active_dims=[1])))  # the line needs its outputscale
    assert set(reset(with_line) or ()) == {"covar_module.base_kernel.kernels.1.lengthscale"}


@pytest.mark.parametrize(
    "kernel",
    [
        ScaleKernel(RBFKernel(active_dims=[0])) + ScaleKernel(far(RBFKernel(active_dims=[1]))),
        far(RBFKernel(active_dims=[0])) * far(MaternKernel(active_dims=[1])),
        far(PeriodicKernel()),
    ],
)
def test_several_lengthscales_and_periods_are_left_to_the_user(kernel: Any) -> None:
    assert reset(kernel, is_start=True) is None


def test_inputs_are_those_that_the_kernel_sees() -> None:
    """Of the model, and of active dims outside: its training inputs have another spread, or fewer columns."""

    class Model(Regression):
        def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
            return super().forward(torch.cat([x, 1e3 * x], dim=-1))

    inner = far(RBFKernel(ard_num_dims=2))
    kernel = ScaleKernel(inner, active_dims=[4, 5])
    assert reset(kernel, make=Model) == pytest.approx(
        {
            "covar_module.outputscale": pytest.approx(0.1, abs=0.04),
            "covar_module.base_kernel.lengthscale[0]": 1e3 * 2**0.5,
            "covar_module.base_kernel.lengthscale[1]": 2e3 * 2**0.5,
        }
    )


def test_single_inputs_are_reset_at_the_start_only() -> None:
    lengthscale = [[0.7, 1e5, 1.0, 5.0]]
    assert reset(far(RBFKernel(ard_num_dims=4), lengthscale)) is None
    kernel = far(RBFKernel(ard_num_dims=4), lengthscale)
    assert reset(kernel, is_start=True) == pytest.approx({"covar_module.lengthscale[1]": 4.0})

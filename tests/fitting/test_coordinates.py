"""Hyperparameters as unconstrained coordinates."""

import math

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, LessThan, Positive

from gpy_iterative.fitting.coordinates import Coordinates, network_parameters
from tests.exact.gaussian_models import CASES
from tests.fitting.problems import regression


class Bounded(gpytorch.Module):
    """One parameter of two entries under any constraint."""

    def __init__(self, constraint: Interval | None, raw: float = 0.3) -> None:
        super().__init__()
        self.register_parameter("raw_value", torch.nn.Parameter(torch.tensor([[raw, raw + 1]], dtype=torch.float64)))
        if constraint is not None:
            self.register_constraint("raw_value", constraint)

    @property
    def value(self) -> torch.Tensor:
        return (
            self.raw_value
            if not hasattr(self, "raw_value_constraint")
            else self.raw_value_constraint.transform(self.raw_value)
        )


CONSTRAINTS = {
    "none": (None, "identity"),
    "positive": (Positive(), "log"),
    "at least": (GreaterThan(1e-4), "log"),
    "exp": (Positive(transform=torch.exp, inv_transform=torch.log), "log"),
    "raw": (GreaterThan(0.025, transform=None), "log"),
    "positive interval": (Interval(0.1, 10.0), "log"),
    "interval": (Interval(-1.0, 3.0), "logit"),
    "unit interval": (Interval(0.0, 1.0), "log"),
    "at most": (LessThan(2.0), "identity"),
    "at least, negative": (GreaterThan(-3.0), "identity"),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_values_are_read_and_written_through_constraints(name: str) -> None:
    constraint, kind = CONSTRAINTS[name]
    module = Bounded(constraint)
    coordinates = Coordinates(module)
    assert [part.kind for part in coordinates.parts] == [kind]
    assert coordinates.names == ["value[0]", "value[1]"]
    values, start = module.value.detach().clone(), coordinates.read()
    assert torch.allclose(coordinates.user_values(start)[0], values)
    coordinates.write(start + 0.1)
    assert torch.allclose(coordinates.read(), start + 0.1)
    forward = {"identity": values + 0.1, "log": values * math.exp(0.1)}
    if kind in forward:
        assert torch.allclose(module.value, forward[kind])


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_derivatives_are_those_of_the_coordinates(name: str) -> None:
    module = Bounded(CONSTRAINTS[name][0])
    coordinates = Coordinates(module)
    start, step = coordinates.read(), 1e-4
    function = lambda: (module.value * torch.tensor([1.0, 2.0])).sum().square() / 2

    def moved(*by: float) -> float:
        coordinates.write(start + torch.tensor(by, dtype=torch.float64))
        return float(function().detach())

    gradient, hessian = coordinates.gradient(function()), coordinates.hessian(function())
    slopes = [(moved(step, 0) - moved(-step, 0)) / (2 * step), (moved(0, step) - moved(0, -step)) / (2 * step)]
    cross = (moved(step, step) - moved(step, -step) - moved(-step, step) + moved(-step, -step)) / (4 * step**2)
    curve = (moved(step, 0) - 2 * moved(0, 0) + moved(-step, 0)) / step**2
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-5)
    assert [float(hessian[0, 1]), float(hessian[0, 0])] == pytest.approx([cross, curve], rel=1e-3, abs=1e-4)


def test_bounds_can_be_reached_but_not_crossed() -> None:
    for constraint in (GreaterThan(1e-4), Interval(0.1, 10.0), LessThan(2.0), GreaterThan(-3.0)):
        for dtype in (torch.float64, torch.float32):
            module = Bounded(constraint).to(dtype)
            coordinates = Coordinates(module)
            for end in (coordinates.lower, coordinates.upper):
                if end.isfinite().all():
                    coordinates.write(end)
                    assert torch.isfinite(module.raw_value).all()
                    assert constraint.check(module.value)
                    assert (coordinates.read() - end).abs().max() < 1e-4


def test_fixed_and_tied_parameters() -> None:
    mll = regression(20)
    assert len(Coordinates(mll)) == 6
    mll.model.covar_module.raw_outputscale.requires_grad_(False)
    assert "covar_module.outputscale" not in Coordinates(mll).names
    tied = gpytorch.kernels.RBFKernel()
    mll = regression(20, covariance=tied + gpytorch.kernels.ScaleKernel(tied))
    assert sum("lengthscale" in name for name in Coordinates(mll).names) == 1


def test_networks_are_recognised() -> None:
    assert [name.split(".")[0] for name in network_parameters(CASES["deep"]().model)] == ["network"] * 4
    assert network_parameters(regression(20)) == {}

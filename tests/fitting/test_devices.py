"""A fit on an accelerator makes the steps of the CPU."""

from typing import Literal

import pytest
import torch
from torch.utils._pytree import tree_map_only

import gpy_iterative as gpi
from gpy_iterative.fitting import AverageInformation
from tests.exact.test_devices import METHODS, regression


def fitted(name: str, device: torch.device, start: Literal["current", "subsets"] = "current") -> list[float]:
    likelihood, model, _, _ = regression(device)
    mll = METHODS[name](likelihood, model)
    result = gpi.fit(mll, progress=False, max_steps=2, start=start)
    assert all(parameter.device.type == device.type for parameter in mll.parameters())
    return [figure for row in result.history for figure in (row.value, row.left_to_gain or 0.0)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "hutchinson", "russian roulette"])
def test_steps(name: str, device: torch.device) -> None:
    assert fitted(name, device) == pytest.approx(fitted(name, torch.device("cpu")), rel=1e-4)


@pytest.mark.slow
def test_start_from_subsets(device: torch.device) -> None:
    # Orders of neighbours, and so probes, depend on the last digits of the start.
    expected = fitted("exact", torch.device("cpu"), "subsets")
    assert fitted("exact", device, "subsets") == pytest.approx(expected, rel=1e-3)


def test_a_state_from_a_file_is_on_the_cpu(device: torch.device) -> None:
    """The curvature's solve begins at solutions of the state: on CUDA no fit resumed."""
    likelihood, model, _, _ = regression(device)
    optimiser = AverageInformation(METHODS["hutchinson"](likelihood, model))
    optimiser.step()
    optimiser.assess()
    optimiser.load_state(tree_map_only(torch.Tensor, torch.Tensor.cpu, optimiser.state()))
    assert optimiser.step() is not None

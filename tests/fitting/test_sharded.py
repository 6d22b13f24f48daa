"""A fit whose kernel products two processes share is that of one process."""

from typing import Any

import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.linear_operators import KernelProducts
from tests.exact.gaussian_models import regression
from tests.processes import Processes

KERNELS = {"radial": lambda: kernels.MaternKernel(nu=1.5, ard_num_dims=3), "periodic": kernels.PeriodicKernel}


def fitted(group: Any, kernel: str) -> dict[str, torch.Tensor]:
    """Two steps, with what they report."""
    case = regression(kernels.ScaleKernel(KERNELS[kernel]()), n=60)
    solver = gpi.solvers.ConjugateGradients(tolerance=1e-6, probe_tolerance=1e-6)
    products = KernelProducts(tile_size=16, process_group=group)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, num_probes=4, solver=solver, products=products, generator=0
    )
    result = gpi.fit(mll, max_steps=2, progress=False)
    return {
        "parameters": torch.cat([parameter.detach().flatten() for parameter in case.model.parameters()]),
        "values": torch.tensor([row.value for row in result.history], dtype=torch.float64),
        "left": torch.tensor([row.left_to_gain for row in result.history], dtype=torch.float64),
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_processes_fit_as_one_does(processes: Processes, kernel: str) -> None:
    alone = fitted(None, kernel)
    assert len(alone["values"]) == 3
    first, second = processes.run(fitted, kernel, size=2)
    for what, expected in alone.items():
        torch.testing.assert_close(
            first[what], expected, rtol=1e-5, atol=1e-6, msg=lambda text, what=what: f"{what}: {text}"
        )
        assert torch.equal(first[what], second[what]), f"{what} differs between ranks"

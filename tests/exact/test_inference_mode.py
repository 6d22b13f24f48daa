"""`torch.inference_mode()` around a prediction or an evaluation leaves nothing behind that training cannot use."""

import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from tests.exact.gaussian_models import Case, regression

HUTCHINSON = gpi.mlls.HutchinsonMarginalLogLikelihood
PATHWISE = gpi.mlls.PathwiseMarginalLogLikelihood
SOLVERS = [
    gpi.solvers.Cholesky(),
    gpi.solvers.ConjugateGradients(),
    gpi.solvers.AlternatingProjections(block_size=16),
    gpi.solvers.StochasticGradientDescent(batch_size=8, tolerance=0.5),
]
KERNELS = {
    "radial": lambda: kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)),
    "generic": lambda: kernels.ScaleKernel(kernels.PeriodicKernel(active_dims=(0,)) * kernels.RBFKernel()),
}


def train(mll: gpi.mlls.HutchinsonMarginalLogLikelihood, case: Case, steps: int = 3) -> list[float]:
    mll.train()
    optimizer = torch.optim.Adam(case.model.parameters(), lr=0.1)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(case.model(case.x), case.y)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "probes", "kernel"),
    [(solver, "preconditioned", "radial") for solver in SOLVERS]
    + [(SOLVERS[1], "rademacher", "generic"), (SOLVERS[2], "preconditioned", "generic")],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_training_goes_on_as_if_the_mode_had_been_no_grad(solver: gpi.solvers.Solver, probes: str, kernel: str) -> None:
    values = []
    for mode in (torch.no_grad, torch.inference_mode):
        case = regression(KERNELS[kernel]())
        mll = HUTCHINSON(case.likelihood, case.model, solver=solver, probes=probes, generator=0)  # type: ignore[arg-type]
        with mode():
            evaluated = mll(case.model(case.x), case.y).item()
        values.append([evaluated, *train(mll, case)])
        with mode():
            values[-1].append(float(mll.posterior()(case.x[:5]).variance.sum()))
        values[-1] += train(mll, case)
    assert values[0] == values[1]


def test_pathwise_training() -> None:
    case = regression(KERNELS["radial"]())
    mll = PATHWISE(case.likelihood, case.model, solver=SOLVERS[1], num_frequencies=50, generator=0)
    with torch.inference_mode():
        mll(case.model(case.x), case.y)
    assert len(train(mll, case)) == 3


@pytest.mark.parametrize("options", [{}, {"exact_below": 0, "rank": 5, "num_neighbours": 4}], ids=["exact", "local"])
def test_predictions_and_paths_are_differentiable_afterwards(options: dict) -> None:
    case = regression(KERNELS["radial"]())
    with torch.inference_mode():
        posterior = gpi.prediction.PathwisePosterior(
            case.model, case.likelihood, solver=gpi.solvers.ConjugateGradients(), num_frequencies=20, **options
        )
        variance = posterior(case.x[:4]).variance.clone()
        paths = posterior.sample_paths(2)
        values = paths(case.x[:4])
    x = case.x[:4].clone().requires_grad_()
    prediction = posterior(x)
    torch.testing.assert_close(prediction.variance, variance)
    torch.testing.assert_close(paths(x), values)
    (prediction.variance.sum() + prediction.mean.sum() + paths(x).sum()).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_tiles_of_inference_tensors_are_never_taken_for_current() -> None:
    with torch.inference_mode():
        x = torch.linspace(0, 1, 6, dtype=torch.float64).unsqueeze(-1)
        operator = gpi.linear_operators.operator_of_kernel(
            kernels.CosineKernel().double(), x, None, gpi.linear_operators.KernelProducts(tile_size=2)
        )
        ones = torch.ones(6, 1, dtype=torch.float64)
        before = operator._matmul(ones)
        x.mul_(3)
        after = operator._matmul(ones)
    assert not torch.allclose(before, after)

"""Training and prediction whose kernel products two and three processes share."""

import os
import time
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.linear_operators import KernelProducts
from gpy_iterative.linear_operators.tiles.ranks import Ranks
from tests.exact.gaussian_models import CASES, Case, regression
from tests.laplace.cases import case
from tests.processes import Processes

CG = gpi.solvers.ConjugateGradients(tolerance=1e-8, probe_tolerance=1e-8, preconditioner=None)
SOLVERS = {
    "cg": CG,
    "preconditioned cg": gpi.solvers.ConjugateGradients(tolerance=1e-8, probe_tolerance=1e-8),
    "projections": gpi.solvers.AlternatingProjections(tolerance=1e-5, probe_tolerance=1e-5, block_size=25),
    "sgd": gpi.solvers.StochasticGradientDescent(tolerance=1e-2, probe_tolerance=1e-2, batch_size=24, max_epochs=10),
    "cholesky": gpi.solvers.Cholesky(),
}
#: SGD's budget ends before its tolerance on purpose; Russian roulette's weights are wild in so few steps.
QUIET = "ignore::gpy_iterative.errors.ConvergenceWarning"


def matern() -> Case:
    return regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=3)), n=72)


def make_mll(case: Case, name: str, solver: str, group: Any, seed: int = 0) -> gpi.mlls.GaussianMarginalLogLikelihood:
    options: dict[str, Any] = {"products": KernelProducts(tile_size=16, process_group=group), "generator": seed}
    if name == "russian roulette":
        truncation = gpi.truncation.ExponentialTruncation(min_steps=10)
        return gpi.mlls.RussianRouletteMarginalLogLikelihood(
            case.likelihood, case.model, truncation=truncation, **options
        )
    classes = {
        "hutchinson": gpi.mlls.HutchinsonMarginalLogLikelihood,
        "pathwise": gpi.mlls.PathwiseMarginalLogLikelihood,
    }
    return classes[name](case.likelihood, case.model, num_probes=4, solver=SOLVERS[solver], **options)


def step(case: Case, mll: gpytorch.mlls.MarginalLogLikelihood, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = -mll(case.model(case.x), case.y, *case.params).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def values(case: Case) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in case.model.parameters()])


def train_and_predict(group: Any, name: str, solver: str) -> dict[str, Tensor]:
    """Two steps of Adam, and what the posterior has to say."""
    case = matern()
    mll = make_mll(case, name, solver, group)
    optimizer = torch.optim.Adam(case.model.parameters(), lr=0.1)
    losses = torch.stack([step(case, mll, optimizer) for _ in range(2)])
    gradient = torch.cat([p.grad.flatten() for p in case.model.parameters() if p.grad is not None])
    posterior = mll.posterior()
    test_x = case.x[:10] + 0.1
    with torch.no_grad():
        prediction = posterior(test_x)
        return {
            "losses": losses,
            "gradient": gradient,
            "parameters": values(case),
            "mean": prediction.mean,
            "variance": prediction.variance,
            "paths": posterior.sample_paths(2)(test_x),
            "mean by GPyTorch": case.model(test_x).mean,
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "solver", "size"),
    [
        ("hutchinson", "cg", 2),
        ("hutchinson", "preconditioned cg", 3),
        ("hutchinson", "projections", 2),
        ("hutchinson", "sgd", 3),
        ("hutchinson", "cholesky", 2),
        ("pathwise", "projections", 3),
        ("pathwise", "cg", 2),
        ("russian roulette", "cg", 3),
    ],
)
@pytest.mark.filterwarnings(QUIET)
def test_training_is_that_of_one_process(processes: Processes, name: str, solver: str, size: int) -> None:
    alone = train_and_predict(None, name, solver)
    first, *others = processes.run(train_and_predict, name, solver, size=size)
    for what, expected in alone.items():
        torch.testing.assert_close(
            first[what], expected, rtol=1e-5, atol=1e-6, msg=lambda text, what=what: f"{what}: {text}"
        )
        for other in others:
            assert torch.equal(other[what], first[what]), f"{what} differs between ranks"


def gradients(group: Any, name: str) -> list[Tensor]:
    """Of a model of some kind, from probes that conjugate gradients solve."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # GPyTorch starts covariances between tasks at random
        case = CASES[name]()
    mll = make_mll(case, "hutchinson", "cg", group)
    (-mll(case.model(case.x), case.y, *case.params).sum()).backward()
    return [torch.zeros(()) if p.grad is None else p.grad for p in case.model.parameters()]


#: Cases whose operators are made as those of another case are.
SIMILAR = {"rbf", "matern-1/2", "matern-5/2", "unscaled", "linear", "priors", "deep", "sum-in-forward"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SIMILAR])
def test_models_of_every_kind_have_the_gradients_of_one_process(processes: Processes, name: str) -> None:
    expected = gradients(None, name)
    for found in processes.run(gradients, name, size=2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def train_until(group: Any, folder: Path, until: int, leaves: str | None = None) -> dict[str, Any]:
    """Adam to a step, from the last checkpoint on, with one after each step; the last rank may leave at step 3."""
    case = matern()
    mll = make_mll(case, "pathwise", "preconditioned cg", group)
    optimizer = torch.optim.Adam(case.model.parameters(), lr=0.1)
    ranks = Ranks(group)
    done, path = 0, folder / "checkpoint.pt"
    if path.exists():
        checkpoint = torch.load(path, weights_only=True)
        case.model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        mll.load_training_state(checkpoint["mll"])
        done = checkpoint["done"]
    for number in range(done + 1, until + 1):
        if leaves and number == 3 and ranks.rank == ranks.size - 1:
            if leaves == "ends":
                os._exit(1)
            time.sleep(SHORT_TIMEOUT + 2)
            return {}
        before, warm_start = values(case), mll.training_state()
        try:
            step(case, mll, optimizer)
        except gpi.errors.RankLostError as error:
            after = mll.training_state()
            return {
                "error": str(error),
                "unchanged": torch.equal(values(case), before)
                and all(torch.equal(after[name], value) for name, value in warm_start.items()),
            }
        if ranks.rank == 0:
            state = {"model": case.model.state_dict(), "optimizer": optimizer.state_dict(), "mll": mll.training_state()}
            torch.save(state | {"done": number}, path)
    return {"parameters": values(case), "steps": until - done}


#: Of a process group that loses a rank, in seconds: longer than a step takes on a machine with other work.
SHORT_TIMEOUT = 8


@pytest.mark.slow
def test_a_rank_that_leaves_ends_the_others_and_a_restart_goes_on_exactly(processes: Processes, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("group", "hangs", "ends", "whole, hangs", "whole, ends")}
    for folder in folders.values():
        folder.mkdir()
    mortal = Processes(3, folders["group"], timeout=SHORT_TIMEOUT)
    try:
        for leaves, size in (("hangs", 2), ("ends", 3)):
            *left, last = mortal.run_and_catch(train_until, folders[leaves], 5, leaves, size=size)
            assert last == ({} if leaves == "hangs" else None)
            for rank, answer in enumerate(left):
                assert answer["error"].startswith(f"Rank {rank} of {size} could not sum with the others")
                assert "from the last checkpoint" in answer["error"]
                assert answer["unchanged"]
    finally:
        mortal.close()
    for leaves, size in (("hangs", 2), ("ends", 3)):
        resumed = processes.run(train_until, folders[leaves], 5, size=size)
        whole = processes.run(train_until, folders[f"whole, {leaves}"], 5, size=size)
        for ours, theirs in zip(resumed, whole, strict=True):
            assert (ours["steps"], theirs["steps"]) == (3, 5)
            assert torch.equal(ours["parameters"], theirs["parameters"])
            assert torch.equal(ours["parameters"], resumed[0]["parameters"])


def train_with_another(group: Any, what: str) -> dict[str, Any]:
    """A step for which the last rank brings a seed, or a target, of its own."""
    case = matern()
    is_other = Ranks(group).rank == 1
    mll = make_mll(case, "hutchinson", "cg", group, seed=int(is_other and what == "seed"))
    if is_other and what == "target":
        case.y[17] += 1e-9
    before = values(case)
    try:
        step(case, mll, torch.optim.Adam(case.model.parameters(), lr=0.1))
    except gpi.errors.RanksDisagreeError as error:
        return {"error": str(error), "unchanged": torch.equal(values(case), before) and mll.report is None}
    return {}


@pytest.mark.parametrize("what", ["seed", "target"])
def test_ranks_that_were_given_something_else_take_no_step(processes: Processes, what: str) -> None:
    for answer in processes.run(train_with_another, what, size=2):
        assert "other vectors to multiply the kernel matrix by" in answer["error"]
        assert answer["unchanged"]


def calls_of_its_own(group: Any, what: str) -> str:
    """The last rank predicts, or takes a value without its gradient, where the others train on."""
    case = matern()
    mll = make_mll(case, "hutchinson", "cg", group)
    optimizer = torch.optim.Adam(case.model.parameters(), lr=0.1)
    step(case, mll, optimizer)
    try:
        if Ranks(group).rank == 1:
            if what == "prediction":
                mll.posterior()(case.x[:3]).mean.sum().backward()
            else:
                mll(case.model(case.x), case.y)
                case.model.zero_grad()
        step(case, mll, optimizer)
    except gpi.errors.RanksDisagreeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["prediction", "value"])
def test_ranks_that_make_other_calls_are_told(processes: Processes, what: str) -> None:
    for answer in processes.run(calls_of_its_own, what, size=2):
        assert "something else to compute (here: a sum of shape (" in answer
    processes.run(calls_of_its_own, "prediction", size=2)  # and they are in step afterwards


def laplace(group: Any, name: str, kind: str) -> dict[str, Tensor]:
    """The evidence of a likelihood that is not Gaussian, its gradient, and predictions from the mode."""
    problem = case(name, 40, kind, products=KernelProducts(tile_size=8, process_group=group))
    mll = gpi.mlls.LaplaceMarginalLogLikelihood(problem.model.likelihood, problem.model, generator=0)
    value = mll(problem.model(problem.x), problem.y)
    value.backward()
    found = {name: p.grad for name, p in problem.model.named_parameters() if p.grad is not None}
    prediction = mll.posterior()(problem.x[:5] + 0.1)
    return found | {"value": value.detach(), "mean": prediction.mean.detach(), "variance": prediction.variance.detach()}


@pytest.mark.parametrize(("name", "kind"), [("probit", "own"), ("softmax", "shared"), ("softmax", "own")])
def test_laplace_evidence_is_that_of_one_process(processes: Processes, name: str, kind: str) -> None:
    expected = laplace(None, name, kind)
    assert len(expected) > 5
    for found in processes.run(laplace, name, kind, size=2):
        for what, value in expected.items():
            torch.testing.assert_close(found[what], value, rtol=1e-5, atol=1e-7)


def stock_with_matrix_free_kernel(group: Any) -> tuple[Tensor, Tensor]:
    """GPyTorch's own conjugate gradients on shared tiles: its solution, and the product that differentiates it."""
    products = KernelProducts(tile_size=8, process_group=group)
    base = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=3))
    problem = regression(gpi.kernels.MatrixFreeKernel(base, products))
    covariance = problem.likelihood(problem.model(problem.x)).lazy_covariance_matrix
    settings = gpytorch.settings
    with settings.max_cholesky_size(1), settings.cg_tolerance(1e-5), settings.max_preconditioner_size(0):
        solution = covariance.solve(problem.y.unsqueeze(-1))
    solution.square().sum().backward()
    return solution.detach(), base.base_kernel.raw_lengthscale.grad


@pytest.mark.slow
def test_stock_code_runs_on_shared_tiles(processes: Processes) -> None:
    expected = stock_with_matrix_free_kernel(None)
    for found in processes.run(stock_with_matrix_free_kernel, size=3):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

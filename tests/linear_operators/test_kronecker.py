"""Products of kernel matrices of points and covariances of tasks: Kronecker, and Hadamard."""

from collections.abc import Callable

import pytest
import torch
from gpytorch import kernels
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import LinearOperator
from linear_operator.operators import (
    DenseLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    PsdSumLinearOperator,
    RootLinearOperator,
)

import gpy_iterative as gpi
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.extensions import columns_matmul, rows_matmul
from gpy_iterative.linear_operators.from_gpytorch import kernel_operator
from gpy_iterative.linear_operators.hadamard import HadamardLinearOperator
from gpy_iterative.linear_operators.kronecker import KroneckerLinearOperator
from gpy_iterative.linear_operators.masked import ObservedLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from tests.exact.gaussian_models import CASES
from tests.linear_operators.radial.test_operator import inputs

TASKS = 3


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return inputs(*shape, seed=seed).double().requires_grad_()


def radial(*batch: int, columns: int | None = None) -> LinearOperator:
    return RadialKernelLinearOperator(
        leaf(*batch, 7, 2),
        torch.full(batch, 1.7, dtype=torch.float64, requires_grad=True),
        x2=None if columns is None else leaf(*batch, columns, 2, seed=1),
        function=MATERN32,
        products=KernelProducts(tile_size=4),
    )


def tasks(*, is_trained: bool = True) -> LinearOperator:
    """As that of an IndexKernel."""
    factor, variances = leaf(TASKS, 1, seed=2), torch.linspace(0.1, 0.5, TASKS, dtype=torch.float64)
    return PsdSumLinearOperator(
        RootLinearOperator(factor.requires_grad_(is_trained)), DiagLinearOperator(variances.requires_grad_(is_trained))
    )


OPERATORS: dict[str, Callable[[], KroneckerLinearOperator]] = {
    "square": lambda: KroneckerLinearOperator(radial(), tasks()),
    "rectangular": lambda: KroneckerLinearOperator(radial(columns=5), tasks()),
    "batch": lambda: KroneckerLinearOperator(radial(2), tasks()),
    "fixed tasks": lambda: KroneckerLinearOperator(radial(), tasks(is_trained=False)),
    "three factors": lambda: KroneckerLinearOperator(DenseLinearOperator(leaf(2, 2, seed=3)), radial(), tasks()),
}


def dense(operator: LinearOperator) -> torch.Tensor:
    """Differentiable, by the factors' entries."""
    if isinstance(operator, HadamardLinearOperator):
        covariances = operator.base.tasks.to_dense()
        pairs = [[covariances[..., a, b] for b in operator.column_tasks] for a in operator.row_tasks]
        points = operator.points.to_dense()
        if operator.row_points is not None:
            points = torch.stack([points[..., row, :] for row in operator.row_points.tolist()], dim=-2)
        if operator.column_points is not None:
            points = torch.stack([points[..., column] for column in operator.column_points.tolist()], dim=-1)
        return points * torch.stack([torch.stack(row, dim=-1) for row in pairs], dim=-2)
    total = torch.ones(1, 1, dtype=torch.float64)
    for factor in operator.linear_ops:
        matrix = factor.to_dense()
        entries = total.unsqueeze(-1).unsqueeze(-3) * matrix.unsqueeze(-2).unsqueeze(-4)
        total = entries.flatten(-2).flatten(-3, -2)
    return total


def hadamard(*batch: int, columns: int | None = None) -> HadamardLinearOperator:
    points, covariances = radial(*batch, columns=columns), tasks().to_dense().detach().requires_grad_()
    row_tasks = torch.arange(7) * 2 % TASKS
    return HadamardLinearOperator.of(
        points, covariances, row_tasks, row_tasks if columns is None else torch.tensor([2, 2, 0, 1, 0])
    )


def repeated(*batch: int, is_square: bool = True) -> HadamardLinearOperator:
    """Ten rows of seven points; the first and the last are the same. Columns of a rectangular one are of three points."""
    covariances, row_points = tasks().to_dense().detach().requires_grad_(), torch.tensor([0, 3, 3, 6, 1, 0, 5, 2, 2, 0])
    row_tasks = torch.arange(10) * 2 % TASKS
    if is_square:
        return HadamardLinearOperator.of(radial(*batch), covariances, row_tasks, row_tasks, row_points, row_points)
    column_tasks, column_points = torch.tensor([2, 2, 0, 1, 0]), torch.tensor([2, 0, 2, 1, 0])
    return HadamardLinearOperator.of(
        radial(*batch, columns=3), covariances, row_tasks, column_tasks, row_points, column_points
    )


OTHERS: dict[str, Callable[[], HadamardLinearOperator]] = {
    "of rows": hadamard,
    "of rows and columns": lambda: hadamard(columns=5),
    "of rows, batch": lambda: hadamard(2),
    "of repeated points": repeated,
    "of repeated points, batch": lambda: repeated(2),
    "of repeated rows and columns": lambda: repeated(is_square=False),
}


@pytest.mark.parametrize("name", [*OPERATORS, *OTHERS])
def test_derivatives_are_those_of_the_dense_matrix(name: str) -> None:
    operator = (OPERATORS | OTHERS)[name]()
    generator = torch.Generator().manual_seed(4)
    rows, columns = operator.shape[-2:]
    left = torch.randn(*operator.batch_shape, rows, 4, dtype=torch.float64, generator=generator)
    right = torch.randn(*operator.batch_shape, columns, 4, dtype=torch.float64, generator=generator)
    trained = [tensor for tensor in operator.representation() if tensor.requires_grad]
    weights = left @ right.mT
    expected = torch.autograd.grad((weights * dense(operator)).sum(), trained)
    with torch.no_grad():
        torch.testing.assert_close(operator @ right, dense(operator) @ right)
        for found in (operator._bilinear_derivative(left, right), operator.matrix_derivative(weights)):
            assert len(found) == len(operator.representation())
            kept = [part for part in found if part is not None]
            for ours, theirs in zip(kept, expected, strict=True):
                torch.testing.assert_close(ours, theirs)


def test_rows_and_columns_of_a_rectangular_product() -> None:
    """Kronecker products counted their columns for rows, products by entries their rows for columns."""
    rows, vectors = torch.tensor([-1, 0, 3]), leaf(5 * TASKS, 2, seed=5).detach()
    for operator in (OPERATORS["rectangular"](), hadamard(columns=5), repeated(is_square=False)):
        matrix, rhs = dense(operator).detach(), vectors[: operator.shape[-1]]
        with torch.no_grad():
            torch.testing.assert_close(rows_matmul(operator, rows, rhs), matrix[rows] @ rhs)
            found = columns_matmul(operator, slice(1, 4), rhs[1:4])
            torch.testing.assert_close(found, matrix[:, 1:4] @ rhs[1:4])


def test_products_with_one_task() -> None:
    """They failed: linear_operator views a product, which is transposed in memory where all points are in one tile."""
    points = RadialKernelLinearOperator(leaf(7, 2), torch.ones((), dtype=torch.float64), function=MATERN32)
    one, vectors = torch.full((1, 1), 0.7, dtype=torch.float64), leaf(7, 3, seed=1).detach()
    numbers = torch.zeros(7, dtype=torch.long)
    for operator in (KroneckerLinearOperator(points, one), HadamardLinearOperator.of(points, one, numbers, numbers)):
        with torch.no_grad():
            torch.testing.assert_close(operator @ vectors, dense(operator) @ vectors)
            torch.testing.assert_close(operator._t_matmul(vectors), dense(operator) @ vectors)


def test_models_that_make_the_product_themselves() -> None:
    found = kernel_operator(KroneckerProductLinearOperator(radial(), tasks()), KernelProducts())
    assert isinstance(found, KroneckerLinearOperator)
    torch.testing.assert_close(found.to_dense(), dense(OPERATORS["square"]()))


@pytest.mark.parametrize("name", ["multitask", "multitask-low-rank-noise", "independent-outputs"])
def test_a_step_stores_no_derivatives_of_a_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training two outputs at 6,000 points took 15 times as long, and four times the memory."""
    monkeypatch.setattr(RadialKernelLinearOperator, "_differentiable_values", None)
    case = CASES[name]()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        case.likelihood, case.model, solver=gpi.solvers.ConjugateGradients(), generator=0
    )
    optimiser = gpi.fitting.AverageInformation(mll)
    assert optimiser.step() is not None


@pytest.mark.parametrize("has_repeated_points", [False, True])
def test_parts_and_entries_of_a_hadamard_product(has_repeated_points: bool) -> None:
    operator, square, batch = hadamard(columns=5), hadamard(), hadamard(2)
    if has_repeated_points:
        operator, square, batch = repeated(is_square=False), repeated(), repeated(2)
    matrix, rows = dense(operator).detach(), torch.tensor([4, 0, 5])
    with torch.no_grad():
        torch.testing.assert_close(operator.mT.to_dense(), matrix.mT)
        torch.testing.assert_close(operator[rows, 1:4].to_dense(), matrix[rows, 1:4])
        torch.testing.assert_close(operator[rows, :].to_dense(), matrix[rows, :])
        torch.testing.assert_close(operator[:, 1:4].to_dense(), matrix[:, 1:4])
        torch.testing.assert_close(operator[2:6].to_dense(), matrix[2:6])
        torch.testing.assert_close(operator[rows, torch.tensor([1, 4, 0])], matrix[rows, [1, 4, 0]])
        torch.testing.assert_close((operator * 3.0).to_dense(), 3 * matrix)
        torch.testing.assert_close(square.diagonal(), dense(square).diagonal())
        torch.testing.assert_close(square[2:6, 2:6].to_dense(), dense(square)[2:6, 2:6])
        torch.testing.assert_close(square.mT.to_dense(), dense(square).mT)
        torch.testing.assert_close(operator.expand(2, *matrix.shape)[1].to_dense(), matrix)
        torch.testing.assert_close(batch[1].to_dense(), dense(batch)[1])
        torch.testing.assert_close(batch.unsqueeze(0).to_dense(), dense(batch).unsqueeze(0))


class _OwnIndexKernel(kernels.IndexKernel):
    def forward(self, i1: torch.Tensor, i2: torch.Tensor, **params: object) -> LinearOperator:
        return super().forward(TASKS - 1 - i1, TASKS - 1 - i2, **params)


@pytest.mark.parametrize("index", [kernels.IndexKernel, _OwnIndexKernel])
@pytest.mark.parametrize("is_first", [True, False])
def test_products_with_an_index_kernel(index: type[kernels.IndexKernel], is_first: bool) -> None:
    of_points, of_tasks = kernels.RBFKernel(active_dims=(0, 1)), index(num_tasks=TASKS, rank=2, active_dims=(2,))
    kernel = (of_tasks * of_points if is_first else of_points * of_tasks).double()
    x = torch.cat([inputs(12, 2).double(), (torch.arange(12) * 2 % TASKS).unsqueeze(-1)], dim=-1)
    with torch.no_grad():
        for columns in (x, x[3:8]):
            found = kernel_operator(kernel(x, columns), KernelProducts())
            assert isinstance(found, HadamardLinearOperator) == (index is kernels.IndexKernel)
            torch.testing.assert_close(found.to_dense(), kernel(x, columns).to_dense())
    for task in (TASKS, -1.0, 1.5, torch.nan):
        x[4, 2] = task
        if index is kernels.IndexKernel:
            with pytest.raises(ValueError, match=f"has 3 tasks, 0 to 2, but the inputs name a task {task:g}"):
                kernel_operator(kernel(x), KernelProducts())


@pytest.mark.parametrize(
    "own",
    [
        lambda: kernels.RBFKernel(active_dims=(0, 1)),
        lambda: kernels.RBFKernel(active_dims=(0,)) * kernels.MaternKernel(active_dims=(1,)),
        lambda: kernels.ScaleKernel(kernels.RQKernel(active_dims=(0,)) + kernels.MaternKernel(active_dims=(1,))),
    ],
)
def test_tasks_at_the_same_inputs(own: Callable[[], kernels.Kernel]) -> None:
    """The kernel is evaluated once for each point: products cost P^2 T, not n^2 T."""
    factors = [own(), kernels.IndexKernel(num_tasks=TASKS, active_dims=(2,))]
    kernel = kernels.ProductKernel(*factors).double()
    wanted = lambda *x: factors[0](*x).to_dense() * factors[1](*x).to_dense()
    points, index = inputs(6, 2).double(), torch.arange(TASKS).repeat(6).unsqueeze(-1)
    x = torch.cat([points.repeat_interleave(TASKS, dim=0), index], dim=-1)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))][:14]
    num_points = len(x[:, :2].unique(dim=0))
    new = torch.cat([inputs(9, 2, seed=1).double(), torch.arange(9).unsqueeze(-1) % TASKS], dim=-1)
    for rows, shape in ((x, (num_points, num_points)), (new, (9, num_points))):
        found = kernel_operator(kernel(rows, x), KernelProducts())
        assert isinstance(found, HadamardLinearOperator)
        assert found.points.shape == shape
        pair = found.to_dense(), wanted(rows, x)
        torch.testing.assert_close(*pair)
        gradients = [torch.autograd.grad(each.square().sum(), list(kernel.parameters())) for each in pair]
        torch.testing.assert_close(*gradients)
    learned = x.clone().requires_grad_()
    pair = [kernel_operator(kernel(learned), KernelProducts()).to_dense(), wanted(learned)]
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), learned)[0] for each in pair))


def test_diagonals_of_inducing_points_are_those_of_data() -> None:
    """In predictions, GPyTorch makes the variance of each datum exact, and no covariance with another task."""
    points, likelihood = inputs(6, 2).double(), GaussianLikelihood()
    own = kernels.InducingPointKernel(kernels.RBFKernel(), points[:2], likelihood, active_dims=(0, 1))
    index = kernels.IndexKernel(num_tasks=TASKS, active_dims=(2,))
    kernel = (own * index).double().eval()
    x = torch.cat([points.repeat(2, 1), torch.arange(2).repeat_interleave(6).unsqueeze(-1)], dim=-1)
    with torch.no_grad():
        found = kernel_operator(kernel(x), KernelProducts()).to_dense()
        torch.testing.assert_close(found, own(x).to_dense() * index(x).to_dense())


def test_columns_of_scattered_points_leave_out_the_points_between(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    points, order = inputs(40, 2).double(), torch.randperm(80, generator=generator)
    operator = HadamardLinearOperator.of(
        RadialKernelLinearOperator(points, torch.tensor(1.7).double(), function=MATERN32),
        tasks().to_dense().detach(),
        *[order % TASKS] * 2,
        *[order // 2] * 2,
    )
    rhs = leaf(4, 3, seed=2).detach()
    monkeypatch.delattr(ObservedLinearOperator, "columns_matmul")  # of all between
    torch.testing.assert_close(columns_matmul(operator, slice(50, 54), rhs), dense(operator)[:, 50:54] @ rhs)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_index_kernel_times_several_kernels(place: int) -> None:
    factors = [kernels.MaternKernel(active_dims=(0,)), kernels.RQKernel(active_dims=(1,))]
    factors.insert(place, kernels.IndexKernel(num_tasks=TASKS, rank=2, active_dims=(2,)))
    kernel = (factors[0] * factors[1] * factors[2]).double()
    x = torch.cat([inputs(12, 2).double(), (torch.arange(12) * 2 % TASKS).unsqueeze(-1)], dim=-1)
    found = kernel_operator(kernel(x), KernelProducts())
    assert isinstance(found, HadamardLinearOperator)
    assert isinstance(found.points, RadialProductLinearOperator)
    vectors = torch.ones(12, 2, dtype=torch.float64)
    products = found @ vectors, kernel(x).to_dense() @ vectors
    torch.testing.assert_close(*products)
    found, expected = (torch.autograd.grad(each.square().sum(), list(kernel.parameters())) for each in products)
    torch.testing.assert_close(found, expected)

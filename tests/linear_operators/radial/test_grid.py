"""Products of kernels at inputs on an incomplete grid, beside GPyTorch's dense matrices."""

import gc
import math
import pickle
import weakref
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.utils.grid import create_data_from_grid
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.fitting.steps.directional import directional_product
from gpy_iterative.linear_operators import KernelProducts, operator_of_kernel
from gpy_iterative.linear_operators.extensions import in_float64, low_precision_copy, with_products
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.radial import grid
from gpy_iterative.linear_operators.radial.grid import axes_of
from gpy_iterative.linear_operators.radial.product import RadialProductLinearOperator
from gpy_iterative.linear_operators.radial.product_tiles import ProductTiles
from gpy_iterative.linear_solvers.conjugate_gradients import ConjugateGradients
from gpy_iterative.linear_solvers.default import default_solver
from gpy_iterative.worker_threads import ByDevice
from tests.linear_operators.radial.test_product import assert_far_field, operator_of, random

PRODUCTS = KernelProducts(tile_size=16)
MADE = {
    "smooth space, periodic time": lambda: kernels.ScaleKernel(
        kernels.RBFKernel(active_dims=(0, 1), ard_num_dims=2)
        * kernels.PeriodicKernel(active_dims=(2,))
        * kernels.MaternKernel(nu=2.5, active_dims=(2,))
    ),
    "smooth space and time": lambda: kernels.RBFKernel(active_dims=(0, 1)) * kernels.RBFKernel(active_dims=(2,)),
    "space and time": lambda: kernels.ScaleKernel(
        kernels.MaternKernel(nu=1.5, active_dims=(0, 1), ard_num_dims=2)
        * kernels.MaternKernel(nu=0.5, active_dims=(2,))
    ),
    "two kernels of time": lambda: kernels.ScaleKernel(
        kernels.MaternKernel(nu=2.5, active_dims=(0, 1))
        * kernels.RQKernel(active_dims=(2,))
        * kernels.PeriodicKernel(active_dims=(2,))
    ),
}


def on_grid(stations: int = 12, days: int = 15, *, missing: float = 0.2, repeated: int = 5) -> Tensor:
    """Stations on some days, in any order; some twice."""
    generator = torch.Generator().manual_seed(1)
    station, day = torch.meshgrid(torch.arange(stations), torch.arange(days), indexing="ij")
    x = torch.cat([random(stations, 2)[station.flatten()], 0.3 * day.flatten().unsqueeze(-1).double()], dim=-1)
    kept = torch.randperm(len(x), generator=generator)[round(missing * len(x)) :]
    return torch.cat([x[kept], x[kept[:repeated]]])


def made(name: str) -> kernels.Kernel:
    kernel, generator = MADE[name]().double(), torch.Generator().manual_seed(1)
    for parameter in kernel.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
    return kernel


def sizes(operator: RadialProductLinearOperator) -> list[int]:
    found = operator.tiles().grid
    return [] if found is None else [axis.size for axis in found.axes]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("entries", [None, 2 * 12 * 15])
def test_products_and_derivatives(monkeypatch: pytest.MonkeyPatch, name: str, entries: int | None) -> None:
    if entries is not None:  # two columns at a time
        monkeypatch.setattr(grid, "ENTRIES", ByDevice(cpu=entries, accelerator=entries))
    kernel, x = made(name), on_grid()
    operator, dense = operator_of(kernel, x), kernel(x).to_dense()
    assert sorted(sizes(operator)) == [12, 15]
    left, right, close = random(len(x), 3), random(len(x), 3, seed=1), {"rtol": 1e-6, "atol": 1e-6}
    with torch.no_grad():
        torch.testing.assert_close(operator @ right, dense @ right, **close)
        batch = random(2, len(x), 3)
        torch.testing.assert_close(operator._matmul(batch), dense @ batch, **close)
    parameters = list(kernel.parameters())
    expected = torch.autograd.grad((left * (dense @ right)).sum(), parameters)
    found = torch.autograd.grad((left * (operator @ right)).sum(), parameters)
    torch.testing.assert_close(found, expected, **close)


def test_many_columns_are_not_in_all_cells_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "ENTRIES", ByDevice(cpu=2 * 12 * 15, accelerator=1))
    x = on_grid()
    found = operator_of(made("space and time"), x).tiles().grid
    assert found is not None
    assert [columns.shape for columns in found.columns(random(len(x), 5))] == [(len(x), 2), (len(x), 2), (len(x), 1)]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_derivatives_of_a_product_along_hyperparameters(name: str, batch: tuple[int, ...]) -> None:
    kernel, x = made(name), on_grid()
    vector = random(*batch, len(x), seed=2)
    for parameter in kernel.parameters():
        tensors, step = operator_of(kernel, x).representation(), 1e-5
        moved = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.data += sign * step
                moved.append((operator_of(kernel, x).representation(), vector @ kernel(x).to_dense()))
                parameter.data -= sign * step
        (above, product), (below, other) = moved
        tangent = [
            (a - b) / (2 * step) if tensor.requires_grad and not torch.equal(a, b) else None
            for tensor, a, b in zip(tensors, above, below, strict=True)
        ]
        operator = operator_of(kernel, x)
        assert operator.tiles().grid is not None
        found = directional_product(operator, vector).along(tangent)
        assert found is not None
        torch.testing.assert_close(found, (product - other) / (2 * step), rtol=1e-4, atol=1e-5)


def test_a_period_moves_days_apart_that_lie_on_one_another() -> None:
    kernel = (kernels.MaternKernel(nu=1.5, active_dims=(0, 1)) * kernels.PeriodicKernel(active_dims=(2,))).double()
    x = on_grid()
    x[:, 2] = (x[:, 2] / 0.3).round()
    kernel.kernels[1].period_length = 4.0
    operator, left, right = operator_of(kernel, x), random(len(x), 3), random(len(x), 3, seed=1)
    assert sorted(sizes(operator)) == [12, 15]
    found = torch.autograd.grad((left * (operator @ right)).sum(), list(kernel.parameters()))
    expected = torch.autograd.grad((left * (kernel(x).to_dense() @ right)).sum(), list(kernel.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_an_axis_with_a_far_field() -> None:
    kernel, x = made("space and time"), on_grid(1500, 4, missing=0.05, repeated=0)
    operator, exact = (operator_of(kernel, x, products=KernelProducts(far_field=error)) for error in (1e-4, None))
    assert_far_field(kernel, operator, exact, random(len(x), 2), errors=(1e-7, 1e-4), atol=1e-4)


def test_copies() -> None:
    x = on_grid()
    operator, vectors = operator_of(made("two kernels of time"), x).detach(), random(len(x), 2)
    product = operator @ vectors
    lower = low_precision_copy(with_products(operator, lambda _: KernelProducts(precision="float32")))
    assert isinstance(lower, RadialProductLinearOperator)
    for copied in (3 * operator / 3, in_float64(lower), lower):
        assert isinstance(copied, RadialProductLinearOperator)
        assert sizes(copied) == sizes(operator)
        found = (copied @ vectors.to(copied.dtype)).double()
        torch.testing.assert_close(found, product, rtol=1e-4, atol=1e-4)


def test_axes_have_the_products_of_a_copy() -> None:
    """Without kept tiles a copy keeps none of the axes either; its precision is native."""
    products = KernelProducts(tile_size=16, precision="float32")
    operator = operator_of(made("two kernels of time"), on_grid(), products=products).detach()
    for copied, memory in ((in_float64(operator, keeps_tiles=False), 0), (low_precision_copy(operator), None)):
        assert isinstance(copied, RadialProductLinearOperator)
        copied.tiles().product(slice(None), slice(None), torch.ones(copied.shape[-1], 1, dtype=copied.dtype))
        assert copied.products == replace(products, precision="native", cache_memory=memory)
        for of_axis, *_ in copied.tiles().grid._tiles:
            assert (of_axis.products.precision, of_axis.products.cache_memory) == ("native", memory)


def test_an_operator_is_pickled_and_freed() -> None:
    x = on_grid()
    operator, vectors = operator_of(made("two kernels of time"), x).detach(), random(len(x), 2)
    product = operator._matmul(vectors)
    torch.testing.assert_close(pickle.loads(pickle.dumps(operator))._matmul(vectors), product)
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(operator)
        del operator
        assert alive() is None
    finally:
        gc.enable()


def test_axes() -> None:
    x = on_grid(repeated=0)
    place, time, phase = x[:, :2], x[:, 2:], x[:, 2:].remainder(0.9)
    assert sorted(axis.size for axis in axes_of([place, time])) == [12, 15]
    axes = {axis.factors: axis for axis in axes_of([time, place, phase])}
    joined = next(axis for factors, axis in axes.items() if set(factors) == {0, 2})
    assert joined.size == 15
    for axis in axes.values():
        for factor in axis.factors:
            inputs = (time, place, phase)[factor]
            torch.testing.assert_close(inputs[axis.first][axis.place], inputs, rtol=0, atol=0)
    assert not axes_of([place, place])  # one axis
    assert not axes_of([random(100, 2), random(100, 1, seed=1)])  # no grid
    assert not axes_of([place[:20], time[:20]])  # few cells have data
    three = torch.cartesian_prod(*(torch.arange(k, dtype=torch.float64) for k in (4, 5, 6)))
    assert sorted(axis.size for axis in axes_of(list(three.split(1, dim=-1)))) == [4, 5, 6]


def test_most_cells_have_one_datum() -> None:
    for x, has_cells in (
        (on_grid(missing=0, repeated=0), True),
        (on_grid(repeated=0), True),
        (on_grid(missing=60, repeated=0), False),
        (on_grid(missing=0), False),
    ):
        operator = operator_of(made("two kernels of time"), x)
        cells = operator.grid_cells()
        assert (cells is not None) is has_cells
        if cells is not None:
            first, second = operator.axis_kernels()
            dense = torch.kron(first.to_dense(), second.to_dense())
            torch.testing.assert_close(dense[cells][:, cells], operator.to_dense(), rtol=1e-6, atol=1e-7)
    moved = on_grid(missing=0, repeated=0)
    moved[:2] = moved[[1, 1]].clone()  # as many data as cells
    assert operator_of(made("two kernels of time"), moved).grid_cells() is None


@pytest.mark.parametrize("ard", [None, 2])
def test_an_rbf_kernel_of_few_inputs_has_an_axis_for_each(ard: int | None) -> None:
    axes = [torch.linspace(0, 1, size, dtype=torch.float64) for size in (6, 9)]
    x = create_data_from_grid(axes)
    base = kernels.RBFKernel(ard_num_dims=ard).double()
    for kernel in (base, kernels.ScaleKernel(kernels.GridKernel(base, axes)).double()):
        operator, expected = operator_of(kernel, x), kernel(x).to_dense()
        assert sizes(operator) == [6, 9]
        torch.testing.assert_close(operator.to_dense(), expected, rtol=1e-6, atol=1e-7)
        assert operator.grid_cells() is not None
    assert operator_of(base, x[1:]).grid_cells() is not None
    for inputs in (x[random(54, 1).squeeze(-1).argsort()[15:]], random(50, 2)):  # many empty cells; no grid
        assert not isinstance(operator_of_kernel(base, inputs, None, PRODUCTS), RadialProductLinearOperator)


def test_an_rbf_kernel_of_stations_stays_one_factor() -> None:
    """Of two, their axis would have no far field."""
    operator = operator_of(made("smooth space and time"), on_grid(missing=0, repeated=0))
    assert len(operator.factors) == 2


@pytest.mark.parametrize("entries", [1, 2**22])
@pytest.mark.parametrize("name", ["two kernels of time", "smooth space and time"])
def test_rows_of_further_points_are_products_over_axes(
    name: str, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tile of K(x, X) is evaluated. Data may share cells, and cells may be empty."""
    monkeypatch.setattr("gpy_iterative.linear_operators.radial.product.ENTRIES", ByDevice(cpu=entries, accelerator=1))
    kernel, x, points = made(name), on_grid(), random(130, 3, seed=4).requires_grad_()
    operator = operator_of_kernel(kernel, points, x, PRODUCTS)
    vectors, expected = random(len(x), 3), kernel(points, x).to_dense()
    gradients = [torch.autograd.grad((each @ vectors).sum(), points)[0] for each in (operator, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)
    monkeypatch.setattr(ProductTiles, "product", None)
    for part in (operator, operator[3:20]):
        rows = expected if part is operator else expected[3:20]
        torch.testing.assert_close(part.detach() @ vectors, rows.detach() @ vectors, rtol=1e-6, atol=1e-7)


def test_few_rows_do_not_look_for_a_grid() -> None:
    x = on_grid(missing=0, repeated=0)
    few, many = (operator_of_kernel(made("space and time"), random(rows, 3), x, PRODUCTS) for rows in (120, 130))
    assert few.grid_cells() is None
    assert many.grid_cells() is not None


def test_learned_inputs_have_derivatives_by_point() -> None:
    kernel, x = made("space and time"), on_grid().requires_grad_()
    operator, vectors = operator_of(kernel, x), random(len(x), 2)
    assert operator.tiles().grid is None
    found = torch.autograd.grad((vectors * (operator @ vectors)).sum(), x)
    expected = torch.autograd.grad((vectors * (kernel(x).to_dense() @ vectors)).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_batches_and_rectangular_matrices_have_no_grid() -> None:
    x = on_grid()
    batch = kernels.MaternKernel(batch_shape=torch.Size([2])).double() * kernels.RQKernel(active_dims=(2,)).double()
    for operator in (operator_of(batch, x), operator_of_kernel(made("space and time"), x, x[:20], PRODUCTS)):
        assert isinstance(operator, RadialProductLinearOperator)
        assert operator.tiles().grid is None


def test_default_solver() -> None:
    x, noise = on_grid(60, 80, missing=0.3, repeated=0), torch.tensor(0.1, dtype=torch.float64)
    operator = operator_of(made("space and time"), x)
    assert isinstance(default_solver(NoisyLinearOperator(operator, noise.expand(len(x)))), ConjugateGradients)


class SpaceAndTime(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = made("space and time")

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.slow
def test_a_step_and_predictions_agree_with_the_dense_matrix() -> None:
    x = on_grid(60, 80, repeated=0)
    y = torch.sin(3 * x[:, 0]) + torch.cos(x[:, 2]) + 0.3 * random(len(x))
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = SpaceAndTime(x, y, likelihood)
    solver = gpi.solvers.ConjugateGradients(
        tolerance=1e-6, max_epochs=200, preconditioner=gpi.preconditioners.Vecchia()
    )
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0, solver=solver)
    value = mll(model(x), y)
    assert mll.report is not None
    with torch.no_grad():
        covariance = model.covar_module(x).to_dense() + likelihood.noise * torch.eye(len(x), dtype=x.dtype)
        lower = torch.linalg.cholesky(covariance)
        weights = torch.cholesky_solve(y.unsqueeze(-1), lower).squeeze(-1)
        logdet = 2 * lower.diagonal().log().sum()
        expected = -0.5 * (y @ weights + logdet + len(x) * math.log(2 * math.pi)) / len(x)
        assert abs(value - expected) <= 4 * mll.report.value_sem
        assert mll.report.value_sem < 0.01
        new = x[:50] + 0.05
        cross = model.covar_module(new, x).to_dense()
        found = mll.posterior()(new)
        torch.testing.assert_close(found.mean, cross @ weights, rtol=1e-4, atol=1e-4)

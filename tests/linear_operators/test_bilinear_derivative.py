"""The derivative of a bilinear form whose terms are known equals the one that visits every tile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_operator import LinearOperator
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.bilinear_derivative import bilinear_derivative
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.linear_operators.radial.tiles import RadialTiles
from tests.linear_operators.radial.test_operator import inputs
from tests.linear_operators.test_matrix_derivative import generic, noise, radial

CASES: dict[str, Callable[[], LinearOperator]] = {
    "radial": radial,
    "radial, batch": lambda: radial(2),
    "radial, rectangular": lambda: radial(2, columns=7),
    "noisy": lambda: NoisyLinearOperator(radial(), noise(13)),
    "noisy, batch": lambda: NoisyLinearOperator(radial(2), noise(13).detach()),
    "noisy, no kernel of ours": lambda: NoisyLinearOperator(generic(), noise(13)),
}


def vectors(operator: LinearOperator) -> tuple[Tensor, Tensor, Tensor]:
    """Left, right, and what the operator makes of them: one number a column."""
    generator = torch.Generator().manual_seed(7)
    left, right = (
        torch.randn(*operator.batch_shape, size, 3, dtype=torch.float64, generator=generator).to(operator.dtype)
        for size in operator.matrix_shape
    )
    return left, right, (left * (operator.to_dense().detach() @ right)).sum(-2, dtype=torch.float64)


@pytest.fixture
def sums_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every pass over the tiles, whether it sums up their values."""
    asked: list[bool] = []
    derivative = RadialTiles.derivative

    def spied(self: RadialTiles, *args: Any, value: bool, **options: Any) -> Any:
        asked.append(value)
        return derivative(self, *args, value=value, **options)

    monkeypatch.setattr(RadialTiles, "derivative", spied)
    return asked


@pytest.mark.parametrize("case", CASES)
def test_known_forms_give_the_same_derivatives(case: str):
    operator = CASES[case]()
    left, right, forms = vectors(operator)
    with torch.no_grad():
        expected = operator._bilinear_derivative(left, right)
        found = bilinear_derivative(operator, left, right, forms)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("scale", "from_tiles"), [(1.7, False), (0.0, True)])
def test_tiles_are_summed_up_only_where_the_forms_do_not_say_it(
    scale: float, from_tiles: bool, sums_asked_for: list[bool]
):
    kernel = radial()
    with torch.no_grad():
        kernel.outputscale.fill_(scale)
        left, right, forms = vectors(kernel)
        _, found = bilinear_derivative(kernel, left, right, forms)
        expected = (left * ((radial() * (1 / 1.7)).to_dense() @ right)).sum()
    assert sums_asked_for == [from_tiles]
    torch.testing.assert_close(found, expected)


def test_a_scale_alone_takes_no_pass_over_the_tiles(sums_asked_for: list[bool]):
    kernel = radial()
    kernel.x1.requires_grad_(False)
    left, right, forms = vectors(kernel)
    with torch.no_grad():
        found = bilinear_derivative(kernel, left, right, forms)
        assert not sums_asked_for
        expected = kernel._bilinear_derivative(left, right)
    assert found[0] is expected[0] is None
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize(("scale", "from_tiles"), [(1.0, False), (1e-2, False), (1e-6, True), (1e-30, True)])
def test_a_kernel_that_is_lost_beside_the_noise_is_summed_up(
    scale: float, from_tiles: bool, sums_asked_for: list[bool]
):
    """In float32: of the products that a solve gives, rounding leaves nothing of a kernel a millionth of the noise."""
    x = inputs(200, 2).requires_grad_()
    outputscale = torch.tensor(scale, requires_grad=True)
    kernel = RadialKernelLinearOperator(x, outputscale, function=MATERN32, products=KernelProducts(tile_size=64))
    operator = NoisyLinearOperator(kernel, torch.ones(200))
    with torch.no_grad():
        left, right, _ = vectors(operator)
        forms = (operator._matmul(left) * right).sum(-2, dtype=torch.float64)
        found = bilinear_derivative(operator, left, right, forms)[1]
        assert sums_asked_for == [from_tiles]
        values = (kernel.to_dense() / outputscale).double()
        expected = (left.double() * (values @ right.double())).sum(-2)
    assert found is not None
    assert (found.double() - expected.sum()).abs() <= 1e-3 * expected.abs().sum()


def test_a_derivative_that_is_to_be_differentiated_keeps_its_graph():
    kernel = radial()
    left, right, forms = vectors(kernel)
    found = bilinear_derivative(kernel, left, right, forms)[0]
    expected = kernel._bilinear_derivative(left, right)[0]
    assert found is not None
    assert expected is not None
    gradients = [torch.autograd.grad(result.square().sum(), kernel.x1)[0] for result in (found, expected)]
    torch.testing.assert_close(*gradients)

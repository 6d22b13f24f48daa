"""The derivative of a bilinear form whose images are known equals the one that visits every tile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_operator import LinearOperator

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator, bilinear_derivative
from gpy_iterative.linear_operators.radial_tiles import RadialTiles
from tests.linear_operators.test_matrix_derivative import generic, noise, radial

CASES: dict[str, Callable[[], LinearOperator]] = {
    "radial": radial,
    "radial, batch": lambda: radial(2),
    "radial, rectangular": lambda: radial(2, columns=7),
    "noisy": lambda: NoisyLinearOperator(radial(), noise(13)),
    "noisy, batch": lambda: NoisyLinearOperator(radial(2), noise(13).detach()),
    "noisy, no kernel of ours": lambda: NoisyLinearOperator(generic(), noise(13)),
}


def vectors(operator: LinearOperator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Left, right, and what the operator's transpose makes of left."""
    generator = torch.Generator().manual_seed(7)
    left, right = (
        torch.randn(*operator.batch_shape, size, 3, dtype=torch.float64, generator=generator)
        for size in operator.matrix_shape
    )
    return left, right, (operator.to_dense().detach().mT @ left)


@pytest.mark.parametrize("case", CASES)
def test_known_images_give_the_same_derivatives(case: str):
    operator = CASES[case]()
    left, right, image = vectors(operator)
    with torch.no_grad():
        expected = operator._bilinear_derivative(left, right)
        found = bilinear_derivative(operator, left, right, image)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("scale", "from_tiles"), [(1.7, False), (0.0, True)])
def test_tiles_are_summed_up_only_where_the_image_does_not_say_it(
    scale: float, from_tiles: bool, monkeypatch: pytest.MonkeyPatch
):
    asked = []
    derivative = RadialTiles.derivative

    def spied(self: RadialTiles, *args: Any, value: bool, **options: Any) -> Any:
        asked.append(value)
        return derivative(self, *args, value=value, **options)

    monkeypatch.setattr(RadialTiles, "derivative", spied)
    kernel = radial()
    assert isinstance(kernel, RadialKernelLinearOperator)
    with torch.no_grad():
        kernel.outputscale.fill_(scale)
        left, right, image = vectors(kernel)
        _, found = bilinear_derivative(kernel, left, right, image)
        unscaled = radial() * (1 / 1.7)
        expected = (left * (unscaled.to_dense() @ right)).sum()
    assert asked == [from_tiles]
    torch.testing.assert_close(found, expected)

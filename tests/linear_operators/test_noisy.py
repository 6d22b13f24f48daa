"""H = K + D: conformance."""

import unittest

import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase
from torch import Tensor

from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from tests.linear_operators.radial.test_operator import RADIAL_TOLERANCES, dense, inputs


class _Conformance:
    seed = 5
    tolerances = RADIAL_TOLERANCES
    should_test_sample = True
    batch_shape: tuple[int, ...] = ()

    def create_linear_op(self) -> NoisyLinearOperator:
        generator = torch.Generator().manual_seed(1)
        kernel = RadialKernelLinearOperator(
            inputs(*self.batch_shape, 5, 2, spread=2.0).requires_grad_(),
            (2 + torch.rand(self.batch_shape, generator=generator)).requires_grad_(),
            function=MATERN32,
            products=KernelProducts(tile_size=2),
        )
        noise = 0.5 + torch.rand(*self.batch_shape, 5, generator=generator)
        return NoisyLinearOperator(kernel, noise.requires_grad_())

    def evaluate_linear_op(self, linear_op: NoisyLinearOperator) -> Tensor:
        return dense(linear_op.kernel) + torch.diag_embed(linear_op.noise)


class TestNoisy(_Conformance, LinearOperatorTestCase, unittest.TestCase):
    pass


class TestNoisyBatch(_Conformance, LinearOperatorTestCase, unittest.TestCase):
    batch_shape = (3,)


def test_constants_of_a_batch() -> None:
    for batch, size in ((2, 5), (5, 5)):
        kernel = RadialKernelLinearOperator(inputs(batch, size, 2), torch.ones(batch), function=MATERN32)
        operator = NoisyLinearOperator(kernel, torch.full((batch, size), 0.3))
        constant = torch.linspace(1, 2, batch)
        with torch.no_grad():
            scaled = operator.mul(constant[:, None, None]).to_dense()
            torch.testing.assert_close(scaled, operator.to_dense() * constant[:, None, None])

"""The kernels that a prior is the sum of."""

import pytest
import torch
from gpytorch import kernels
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator, SumLinearOperator

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators import KernelProducts, kernel_operator
from gpy_iterative.linear_operators.noisy import NoisyLinearOperator
from gpy_iterative.linear_operators.prior_parts import kernel_terms
from tests.exact.gaussian_models import data


def test_terms_of_a_sum() -> None:
    x, _ = data(20)
    first, second = kernels.RBFKernel(active_dims=(0, 2)).double(), kernels.ScaleKernel(kernels.RQKernel()).double()
    terms = kernel_terms(first(x) + 0.5 * second(x).add_jitter(1e-3))
    assert [term.kernel for term in terms] == [first, second]
    assert terms[0].scale is None
    assert terms[1].scale.item() == 0.5
    torch.testing.assert_close(terms[0].inputs, x[:, [0, 2]])


def test_jitter_in_a_plain_sum_is_noise() -> None:
    """linear_operator makes such sums of `k1(x) + k2(x)` and `k3(x).add_jitter()`; else nobody would draw it."""
    x, _ = data(20)
    kernel, diagonal = kernels.RBFKernel().double(), torch.rand(20, generator=torch.Generator().manual_seed(0)).double()
    jitter, observed = DiagLinearOperator(diagonal), torch.arange(20) > 3
    covariance = SumLinearOperator(kernel(x), SumLinearOperator(3 * kernel(x), jitter) * 0.5)
    assert len(kernel_terms(covariance)) == len(kernel_terms(covariance, observed)) == 2
    operator = kernel_operator(covariance, KernelProducts())
    assert isinstance(operator, NoisyLinearOperator)
    torch.testing.assert_close(operator.noise, 0.5 * diagonal)
    torch.testing.assert_close(operator.to_dense(), covariance.to_dense())
    diagonals = SumLinearOperator(jitter, jitter)
    torch.testing.assert_close(kernel_operator(diagonals, KernelProducts()).to_dense(), 2 * diagonal.diag())


def test_a_bare_matrix_has_no_terms() -> None:
    with pytest.raises(SpectralDensityMissingError, match=r"DenseLinearOperator[\s\S]*Hutchinson"):
        kernel_terms(DenseLinearOperator(torch.eye(3)))


def test_missing_targets_of_several_outputs_are_named() -> None:
    x, _ = data(20)
    covariance = kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=2).double()(x)
    assert len(kernel_terms(covariance)) == 1
    with pytest.raises(SpectralDensityMissingError, match=r"missing targets of several outputs[\s\S]*rsample"):
        kernel_terms(covariance, torch.arange(40) > 0)


@pytest.mark.filterwarnings("ignore:.*StructureKernel.*:DeprecationWarning")
def test_a_kernel_that_makes_its_matrix_at_once_is_named() -> None:
    x, _ = data(20)
    kernel = kernels.ProductStructureKernel(kernels.RBFKernel(), 3).double()
    with pytest.raises(SpectralDensityMissingError, match=r"ProductStructureKernel[\s\S]*ScaleKernel"):
        kernel_terms(kernel(x))
    assert len(kernel_terms(kernels.ScaleKernel(kernel)(x))) == 1

"""The kernels that a prior is the sum of."""

import pytest
import torch
from gpytorch import kernels
from linear_operator.operators import DenseLinearOperator

from gpy_iterative.errors import SpectralDensityMissingError
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

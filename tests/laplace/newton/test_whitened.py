"""R^T K R and its parts against dense matrices."""

import pytest
import torch
from linear_operator.operators import InterpolatedLinearOperator

from gpy_iterative.laplace.likelihoods.pointwise import COVARIANCE_FLOOR
from gpy_iterative.laplace.newton.whitened import whitened_system
from gpy_iterative.linear_operators import rows_matmul
from tests.laplace.cases import case


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("logit", "own"),
        ("softmax", "own"),
        ("softmax", "shared"),
        ("softmax", "multitask"),
        ("softmax", "coregionalised"),
        ("softmax-mixed", "own"),
    ],
)
@pytest.mark.parametrize("rows", [torch.tensor([0, 7, 7, 3, 11]), slice(2, 9)], ids=["index", "slice"])
def test_rows_of_a_product(name: str, kind: str, rows: torch.Tensor | slice, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case(name, n=12, kind=kind)
    prior, likelihood = problem.prior(), problem.pointwise()
    curvature = likelihood.curvature(prior.mean, "auto", COVARIANCE_FLOOR)
    system = whitened_system(prior.operator, curvature)
    size = system.shape[-1]
    root = curvature.root(torch.eye(size, dtype=torch.float64))
    dense = torch.eye(size, dtype=torch.float64) + root.mT @ prior.operator.to_dense() @ root
    rhs = torch.sin(torch.arange(2.0 * size, dtype=torch.float64)).view(size, 2)
    torch.testing.assert_close(system._matmul(rhs), dense @ rhs)

    def never(*_: object) -> None:
        raise AssertionError("rows were interpolated: that is a product with the whole matrix")

    monkeypatch.setattr(InterpolatedLinearOperator, "matmul", never)
    torch.testing.assert_close(rows_matmul(system, rows, rhs), (dense @ rhs)[rows])

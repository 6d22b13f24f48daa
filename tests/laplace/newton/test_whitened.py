"""I + R^T K R against a dense matrix."""

import pytest
import torch

from gpy_iterative.laplace.newton.whitened import WhitenedSystem
from gpy_iterative.linear_operators.extensions import rows_matmul
from gpy_iterative.solvers import LaplaceNewton
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
def test_products(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case(name, n=12, kind=kind)
    prior, likelihood = problem.prior(), problem.pointwise()
    solution = LaplaceNewton().solve(prior, likelihood)
    curvature, system = solution.curvature, WhitenedSystem.at(prior.operator, solution).operator
    size = system.shape[-1]
    root = curvature.root(torch.eye(size, dtype=torch.float64))
    dense = torch.eye(size, dtype=torch.float64) + root.mT @ prior.operator.to_dense() @ root
    rhs = torch.sin(torch.arange(2.0 * size, dtype=torch.float64)).view(size, 2)
    torch.testing.assert_close(system._matmul(rhs), dense @ rhs)
    torch.testing.assert_close(system.diagonal(dim1=-1, dim2=-2), dense.diagonal())  # solves that grow ask for it
    monkeypatch.delattr(torch, "sparse_coo_tensor")  # torch would tell users of unchecked sparse matrices
    rows = torch.tensor([3, 1])
    torch.testing.assert_close(rows_matmul(system, rows, rhs), (dense @ rhs)[rows])

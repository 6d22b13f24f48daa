"""The solver that is chosen where none is named."""

import torch
from linear_operator.operators import ToeplitzLinearOperator

from gpy_iterative.linear_operators import NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32
from gpy_iterative.preconditioners import LowRankPlusVecchia
from gpy_iterative.solvers import AlternatingProjections, Cholesky, ConjugateGradients, default_solver


def test_default_follows_size_and_structure() -> None:
    x = torch.zeros(4000, 2)
    tiled = NoisyLinearOperator(RadialKernelLinearOperator(x, torch.tensor(1.0), function=MATERN32), torch.ones(4000))
    solver = default_solver(tiled)
    assert isinstance(solver, AlternatingProjections)
    assert isinstance(solver.fallback.preconditioner, LowRankPlusVecchia)
    assert isinstance(default_solver(tiled[:3000, :3000]), Cholesky)
    toeplitz = NoisyLinearOperator(ToeplitzLinearOperator(torch.ones(4000)), torch.ones(4000))
    assert isinstance(default_solver(toeplitz), ConjugateGradients)

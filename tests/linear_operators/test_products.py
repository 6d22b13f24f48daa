"""The options of kernel products where the extra that they ask for is missing."""

import subprocess
import sys

WITHOUT_PYKEOPS = """
import sys

sys.modules["pykeops"] = None  # imports of it now raise ImportError
import gpytorch
import torch
import gpy_iterative as gpi

x = torch.randn(20, 2)
operator = gpi.linear_operators.kernel_operator(gpytorch.kernels.RBFKernel()(x), gpi.linear_operators.KernelProducts())
assert operator._matmul(torch.ones(20, 1)).shape == (20, 1)
try:
    gpi.linear_operators.KernelProducts(backend="keops")
except ImportError as error:
    print(error)
"""


def test_without_pykeops_only_its_backend_is_missing() -> None:
    """In a process of its own: gpytorch imports pykeops too."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_PYKEOPS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "pip install 'gpy_iterative[keops]'" in run.stdout
    assert "backend='auto'" in run.stdout

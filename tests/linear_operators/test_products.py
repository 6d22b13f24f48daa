"""The options of kernel products: what is missing where, and what they choose by themselves."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from gpy_iterative.linear_operators import KernelProducts

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


@pytest.mark.slow
def test_without_pykeops_only_its_backend_is_missing() -> None:
    """In a process of its own: gpytorch imports pykeops too."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_PYKEOPS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "pip install pykeops" in run.stdout
    assert "backend='auto'" in run.stdout


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("gibibytes", "rows"), [(139, 4096), (12, 2048), (3, 1024), (0.5, 512)])
def test_tiles_are_sized_by_the_memory_of_the_device(
    gibibytes: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = int(gibibytes * 2**30)
    for free in (total, total // 100):  # tiles of one size, whatever else the memory is taken for at the moment
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, total))
        assert KernelProducts().tile_rows(CUDA) == rows
        assert KernelProducts().cache_budget(CUDA) == free // 2
    assert KernelProducts().tile_rows(CPU) == 512
    assert KernelProducts(tile_size=300).tile_rows(CUDA) == KernelProducts(tile_size=300).tile_rows(CPU) == 300


@pytest.mark.parametrize("is_installed", [False, True])
def test_much_work_is_fused_on_cuda_where_triton_is_installed(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_installed else None)
    many = 150_000
    assert KernelProducts().is_fused(CUDA, many, symmetric=True) is is_installed
    assert not KernelProducts().is_fused(CUDA, many, symmetric=False)
    assert not KernelProducts().is_fused(CUDA, many - 1, symmetric=True)
    assert not KernelProducts().is_fused(CPU, many, symmetric=True)
    assert KernelProducts(compile=True).is_fused(CPU, 1, symmetric=False)
    assert not KernelProducts(compile=False).is_fused(CUDA, many, symmetric=True)


@pytest.mark.parametrize("wanted", [None, "auto", 1e-5])
def test_far_fields(wanted: object) -> None:
    assert KernelProducts(far_field=wanted).far_field == wanted


def test_a_far_field_is_the_default() -> None:
    assert KernelProducts().far_field == "auto"


@pytest.mark.parametrize("wanted", ["never", 0.0, 0.5, -1e-3, float("nan"), True])
def test_far_fields_that_are_none_of_these(wanted: object) -> None:
    with pytest.raises(ValueError, match=f"'auto' or a tolerance from 1e-09 to 0.1, got {wanted!r}"):
        KernelProducts(far_field=wanted)


def test_keops_has_no_far_field() -> None:
    with pytest.raises(ValueError, match=r"far_field=1e-05 does not work with backend=.keops."):
        KernelProducts(backend="keops", far_field=1e-5)


def test_compile_is_a_flag() -> None:
    with pytest.raises(ValueError, match="compile must be True or False, got 'no'"):
        KernelProducts(compile="no")  # pyright: ignore[reportArgumentType]

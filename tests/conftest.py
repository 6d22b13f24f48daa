"""Threads, groups of tests that share what is slow to start, quiet KeOps, and a way to insist on pykeops."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("KEOPS_VERBOSE", "0")  # read when pykeops is first imported
# Torch's compiler starts processes to compile in, as many as there are processors: there is little to compile here.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

from tests.processes import Processes
from tests.simulated_device import DEVICE, SimulatedDevice

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-keops", action="store_true", help="fail where pykeops is not installed")
    parser.addoption("--stress", action="store_true", help="train all pairs of levels in tests/exact/test_stress.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-keops") and importlib.util.find_spec("pykeops") is None:
        raise pytest.UsageError(
            "pykeops is not installed, and its tests were insisted upon: install the extra 'keops'."
        )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("processes"))  # they are started once


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Networks and covariances between tasks begin at random: the same numbers in every order of tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """An accelerator: one that is not there, and CUDA where it is."""
    if request.param == "cuda":
        yield torch.device("cuda")
    else:
        with SimulatedDevice():
            yield DEVICE


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Three processes, two of which are a group too."""
    started = Processes(3, tmp_path_factory.mktemp("processes"))
    yield started
    started.close()

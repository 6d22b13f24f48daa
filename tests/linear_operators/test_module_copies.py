"""Copies of modules: what is written on them stays on them, and what they hold is the originals'."""

import gc
import weakref
from collections.abc import Callable

import gpytorch
import pytest
import torch
from torch import Tensor, nn

from gpy_iterative.linear_operators.module_copies import ModuleCopies

APART = {"own": ("_parameters", "_buffers"), "apart": True}


class Network(nn.Module):
    """Dropout wherever a module may be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 3), nn.Dropout(0.5)
        self.tied = self.layer
        self.in_a_list, self.in_a_dict = [nn.Dropout(0.5)], {"name": (nn.Dropout(0.5),)}
        self.method, self.seen = self.dropout.forward, []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        x = self.method(self.in_a_list[0](self.in_a_dict["name"][0](self.tied(x))))
        return self.dropout(x)


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.dropout = nn.LSTM(3, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.lstm(x)[0])

    return Last()


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), backend="eager")


def compiled_in_place() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    module.compile(backend="eager")
    return module


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(3, 3)), torch.jit.script(nn.Dropout(0.5)))


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Dropout(0.5))


MODULES = [Network, recurrent, compiled, compiled_in_place, scripted, weight_norm]


def in_evaluation_mode(module: nn.Module) -> nn.Module:
    """Also what no module knows of."""
    for part in (*getattr(module, "in_a_list", ()), *getattr(module, "in_a_dict", {"name": ()})["name"]):
        part.eval()
    return module.eval()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", MODULES)
def test_a_mode_is_the_copys_own(make: Callable[[], nn.Module]) -> None:
    """Without dropout the copy is a function, while the original goes on dropping."""
    torch.manual_seed(0)
    module, x = make(), torch.randn(50, 3)
    copied = in_evaluation_mode(ModuleCopies(**APART).of(module))
    assert all(part.training for part in module.modules())
    assert torch.equal(copied(x), copied(x))
    assert not torch.equal(module(x), module(x))
    assert list(copied.state_dict()) == list(module.state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [make for make in MODULES if make is not scripted])
def test_tensors_can_be_the_copys_own(make: Callable[[], nn.Module]) -> None:
    """Wherever a module keeps a parameter, the copy has the same one in its place."""
    module, x = make(), torch.randn(5, 3)
    frozen = lambda tensor: nn.Parameter(tensor.detach().clone(), requires_grad=False)
    copied = in_evaluation_mode(ModuleCopies(**APART, tensor=frozen).of(module))
    before = copied(x)
    assert not before.requires_grad
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    torch.testing.assert_close(copied(x), before)


def test_what_is_there_twice_stays_one() -> None:
    module = Network()
    copied = ModuleCopies(tensor=torch.clone, own=("_parameters",)).of(module)
    assert copied.tied is copied.layer
    assert copied.tied is not module.tied
    assert copied.tied.weight is copied.layer.weight


def test_a_copy_does_not_hold_the_original() -> None:
    """An original model holds a prediction strategy, which may be large."""
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    copied, original = ModuleCopies(**APART).of(kernel), weakref.ref(kernel)
    del kernel
    gc.collect()
    assert original() is None
    assert copied.outputscale > 0


def test_a_copy_takes_states_with_old_names() -> None:
    """GPyTorch renames them in a hook."""
    copied = ModuleCopies(**APART).of(gpytorch.means.ConstantMean())
    with pytest.warns(gpytorch.utils.warnings.OldVersionWarning):
        copied.load_state_dict({"constant": torch.tensor([2.0])})
    assert copied.constant == 2


def test_containers_are_shared_unless_apart() -> None:
    """GPyTorch's kernels leave their added loss terms in a dict, where training looks for them."""
    module = Network()
    ModuleCopies().of(module)(torch.ones(2, 3))
    assert module.seen == [2]
    ModuleCopies(**APART).of(module)(torch.ones(4, 3))
    assert module.seen == [2]

"""Copies of modules that share their tensors.

Other threads would see what an evaluation writes on modules: modes, parameters of `functional_call`, GPyTorch's caches.
"""

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

Copied = TypeVar("Copied", bound=Module)

_OF_ALL_MODULES = frozenset(vars(Module()))
_ATOMS = (type(None), bool, int, float, str)


class ModuleCopies:
    """Copies modules and all modules inside; a module or parameter that occurs twice stays one.

    Args:
        own: tensor dicts that copies do not share. A shared dict keeps what a call registers, such as RFFKernel's
            frequencies.
        apart: whether lists, dicts and sets are not shared.
        tensor, kind: map tensors and classes to those of copies.

    Modules in lists and dicts, and modules' methods in attributes, are copied too. Compiled modules run uncompiled,
    because compiled code calls the originals.
    """

    def __init__(
        self,
        *,
        own: tuple[str, ...] = (),
        apart: bool = False,
        tensor: Callable[[Tensor], Tensor] | None = None,
        kind: Callable[[type[Module]], type[Module]] = lambda kind: kind,
    ) -> None:
        self._own, self._apart, self._tensor, self._kind = own, apart, tensor, kind
        self._known: dict[int, Any] = {}

    def of(self, module: Copied) -> Copied:
        if id(module) in self._known:
            return self._known[id(module)]
        if isinstance(module, torch.jit.ScriptModule):  # its state is not in Python
            copied = self._known[id(module)] = copy.deepcopy(module) if self._apart else module
            return copied
        copied = self._known[id(module)] = object.__new__(self._kind(type(module)))
        before, state = vars(module), vars(copied)
        state.update(before)
        for name in ("_modules", *self._own):
            state[name] = {key: self._value(held) for key, held in before[name].items()}
        for name, value in before.items():
            if name not in _OF_ALL_MODULES and type(value) not in _ATOMS:
                state[name] = self._value(value)
        state.pop("_compiled_call_impl", None)
        # GPyTorch has a method of the original, which copies and their pickles would hold, with its prediction strategy.
        hooks = before["_load_state_dict_pre_hooks"].items()
        state["_load_state_dict_pre_hooks"] = OrderedDict(
            (key, hook) for key, hook in hooks if not isinstance(hook.hook, MethodType)
        )
        if "_orig_mod" in state["_modules"]:  # torch.compile's wrapper
            state["forward"] = state["_modules"]["_orig_mod"]
        return copied

    def _value(self, value: Any) -> Any:
        if isinstance(value, Module):
            return self.of(value)
        if isinstance(value, Tensor):
            if self._tensor is None:
                return value
            if not isinstance(value, Parameter):
                return self._tensor(value)
            if id(value) not in self._known:
                self._known[id(value)] = self._tensor(value)
            return self._known[id(value)]
        if isinstance(value, MethodType) and isinstance(value.__self__, Module):
            return MethodType(value.__func__, self.of(value.__self__))
        if type(value) in (list, tuple, dict, OrderedDict):
            return self._container(value)
        return set(value) if type(value) is set and self._apart else value

    def _container(self, container: Any) -> Any:
        is_dict = isinstance(container, dict)
        before = list(container.values() if is_dict else container)
        after = [self._value(held) for held in before]
        if not self._apart and all(map(operator.is_, after, before)):
            return container
        return type(container)(zip(container, after, strict=True) if is_dict else after)

"""Modules on a device, whether it is there or simulated."""

from typing import TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)


def moved(module: Module, device: torch.device) -> Module:
    """The module, its parameters and buffers replaced by copies on the device. (`Module.to` cannot change their type.)"""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module

"""Random numbers, drawn on the generator's device and then moved: models on all devices get the same.

`device` None is the generator's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def given_or_seeded(generator: torch.Generator | None) -> torch.Generator:
    """None is a new generator with seed 0."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def normal(
    shape: Sequence[int],
    generator: torch.Generator,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Independent standard normal numbers."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=dtype).to(device=device)


def uniform(shape: Sequence[int], generator: torch.Generator, device: torch.device | None = None) -> Tensor:
    """Independent numbers from 0 to 1, without 1; float64."""
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64).to(device=device)


def integers(stop: int, shape: Sequence[int], generator: torch.Generator, device: torch.device | None = None) -> Tensor:
    """Independent integers from 0 to `stop`, without `stop`."""
    return torch.randint(stop, shape, generator=generator, device=generator.device).to(device=device)


def permutation(size: int, generator: torch.Generator, device: torch.device | None = None) -> Tensor:
    return torch.randperm(size, generator=generator, device=generator.device).to(device=device)

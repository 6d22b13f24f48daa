"""Formats lower than the inputs' own in which tiles are kept and multiplied, and where they are allowed.

Sixteen bits are a format to keep tiles in: twice or four times as many fit into the same memory. A CPU widens a kept tile
to float32 before it multiplies it; a CUDA device multiplies it as it is, with sums in float32 that are rounded once a tile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["native", "float32", "tf32", "bfloat16", "float16"]

#: What tiles are kept in; everything beside tiles is float32.
KEPT: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
#: The relative distance of neighbouring numbers. TF32 has the digits of float16 and the range of float32.
EPS: dict[str, float] = {name: torch.finfo(dtype).eps for name, dtype in KEPT.items()} | {
    "tf32": torch.finfo(torch.float16).eps
}

#: The CUDA compute capability that multiplies a format at its own speed.
_CAPABILITY = {"tf32": (8, 0), "bfloat16": (8, 0), "float16": (7, 0)}


def check_precision(precision: Precision, dtype: torch.dtype, device: torch.device) -> None:
    """Does nothing where a kernel matrix of this dtype can be multiplied in this precision on this device.

    Raises:
        ValueError: it cannot, or there would be nothing to gain.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"Gaussian processes need float32 or float64, and the kernel or its inputs are {dtype}: call model.float() and "
            "convert the data. KernelProducts(precision='bfloat16') keeps their kernel matrices in half precision."
        )
    if precision == "native":
        return
    if precision == "float32" and dtype == torch.float32:
        raise ValueError(
            "precision='float32' is for float64 inputs, and these are float32 already: leave 'native', or call "
            "model.double() and convert the data where the accuracy of float64 is wanted."
        )
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(
            f"precision='tf32' needs a CUDA device, and the inputs are on {device}: leave 'native', or take 'float32' for "
            "float64 inputs."
        )
    if device.type == "cuda" and precision in _CAPABILITY:
        found = torch.cuda.get_device_capability(device)
        if found < _CAPABILITY[precision]:
            raise ValueError(
                f"precision={precision!r} needs compute capability {'.'.join(map(str, _CAPABILITY[precision]))}, and "
                f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}: leave 'native'."
            )


@dataclass(frozen=True)
class TileArithmetic:
    """How tiles are kept, and what vectors are multiplied by.

    Args:
        kept: the format of kept tiles; None for the one that they are evaluated in.
        widens: kept tiles are widened again before they are multiplied.
        tensor_float32: products round float32 to TF32.
    """

    kept: torch.dtype | None = None
    widens: bool = False
    tensor_float32: bool = False

    @cached_property
    def is_native(self) -> bool:
        """Whether tiles are kept and multiplied as they are evaluated."""
        return self.kept is None and not self.tensor_float32

    def times(self, vectors: Tensor, tiles: Tensor) -> Tensor:
        """The product vectors [..., s, m] @ tiles [..., m, k], in the vectors' dtype."""
        if tiles.dtype != vectors.dtype:
            return _rounded_product(vectors, tiles)
        if self.tensor_float32:
            with _tensor_float32():
                return vectors @ tiles
        return vectors @ tiles

    def add_times_(self, out: Tensor, vectors: Tensor, tiles: Tensor) -> None:
        """Adds vectors [*b, g, s, m] @ tiles [*b, g, m, k] to out [*b, g, s, k]."""
        if self.is_native and out.dim() == 3:
            out.baddbmm_(vectors, tiles)
        else:
            out += self.times(vectors, tiles)

    def add_tiles_times_(self, out: Tensor, tiles: Tensor, vectors: Tensor) -> None:
        """Adds tiles [*b, g, k, m] @ the transposes of vectors [*b, g, s, m] to out [*b, g, k, s]."""
        if self.is_native and out.dim() == 3:
            out.baddbmm_(tiles, vectors.mT)
        else:
            out += self.times(vectors, tiles.mT).mT


#: Everything in the inputs' own dtype.
NATIVE = TileArithmetic()


def tile_arithmetic(precision: Precision, device: torch.device) -> TileArithmetic:
    """The arithmetic of float32 tiles in this precision."""
    if precision in ("native", "float32"):
        return NATIVE
    if precision == "tf32":
        return TileArithmetic(tensor_float32=True)
    return TileArithmetic(kept=KEPT[precision], widens=device.type == "cpu")


def _rounded_product(vectors: Tensor, tiles: Tensor) -> Tensor:
    """The product in the tiles' format. Vectors are scaled to a sum of 1: no result exceeds the tiles' largest entry."""
    scale = vectors.abs().sum(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((vectors / scale).to(tiles.dtype) @ tiles).to(vectors.dtype) * scale


@contextmanager
def _tensor_float32() -> Iterator[None]:
    """TF32 for the products inside. The switch is the whole process's, and is put back at once."""
    switch = torch.backends.cuda.matmul
    name, on = ("fp32_precision", "tf32") if hasattr(switch, "fp32_precision") else ("allow_tf32", True)
    before = getattr(switch, name)
    setattr(switch, name, on)
    try:
        yield
    finally:
        setattr(switch, name, before)

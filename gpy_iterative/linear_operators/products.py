"""Options of products with kernel matrices."""

import importlib.util
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from gpy_iterative.checks import check_choice, check_count, check_flag, check_number
from gpy_iterative.linear_operators.tiles.ranks import Ranks, check_group
from gpy_iterative.worker_threads import ByDevice

try:
    import pykeops
except ImportError:
    pykeops = None

Backend = Literal["auto", "tiles", "keops"]
Precision = Literal["native", "float32"]
FAR_FIELD_TOLERANCES = (1e-9, 0.1)
#: Rows from which "auto" far fields are tried.
FAR_FIELD_ROWS = ByDevice(cpu=4000, accelerator=50_000)

#: Bytes.
MAX_CPU_CACHE = 4 * 1024**3
#: Rows of a tile, which stays in a CPU's cache, or takes longer than the start of a CUDA kernel. CUDA's are bounded by
#: total memory, because free memory differs between steps and ranks.
CPU_TILE = 512
CUDA_TILES = (4096, 2048, 1024)
CUDA_TILE_SHARE = 32
#: Rows from which CUDA's tiles are compiled: below, the compiler takes longer than it saves.
FUSED_ROWS = 150_000
#: Four float64 numbers per entry.
_SCRATCH_BYTES = 4 * 8


def require_pykeops() -> None:
    if pykeops is None:
        raise ImportError(
            "KernelProducts(backend='keops') needs pykeops, which is not installed: pip install pykeops, "
            "or leave backend='auto'."
        )


@dataclass(frozen=True)
class KernelProducts:
    """Options of kernel products: `products=` of every mll and of `MatrixFreeKernel`.

    Args:
        backend: "tiles" evaluates square tiles with torch. "keops" compiles radial kernels to one loop; it needs the extra
            `keops` and a C++ compiler at run time, and other options then concern only dense blocks. "auto" is tiles.
        tile_size: rows and columns of a tile; None is 512 on a CPU and up to 4,096 on CUDA, by total memory. Ranks with
            different devices need a number.
        cache_memory: bytes for kept tiles and their derivatives; None is half of the free memory (at most 4 GB on a CPU),
            0 keeps none.
        precision: of products inside an iterative solve. "native" is the inputs' dtype. "float32", for float64 inputs,
            multiplies float32 tiles and reaches the tolerance by iterative refinement, with one float64 product a
            round. All else stays in float64, also truncated series and the search for Laplace's mode.
        compile: fuse a tile's element-wise work with torch.compile, which needs a compiler at run time (Triton on CUDA).
            None does so on CUDA with Triton, for training data of 150,000 rows and more.
        process_group: the processes that share the tiles; "world" is the default group. Every rank must run the same
            program on the same data with the same seeds. A product with s columns takes one all-reduce of n s numbers.
            `cache_memory` is per rank.
        far_field: error, from 1e-9 to .1, of a radial kernel's entries relative to their standard deviation. Blocks of
            distant points are compressed: the cost grows with n, not n^2, for up to three dimensions (long lengthscales
            do not count). "auto" is at most 1e-6 from 4,000 rows on (CUDA: 50,000), where less than half of the entries
            are evaluated (CUDA: a quarter). None uses tiles, as do cases that save nothing. Rows, columns and dense
            blocks are exact.

    Raises:
        ValueError: an option is outside its range, or the process group is not initialised, lacks this process, or is
            combined with KeOps.
        TypeError: not a process group.
        ImportError: the backend is "keops", and pykeops is not installed.

    Examples:
        >>> products = gpi.linear_operators.KernelProducts(cache_memory=500_000_000)
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, products=products)
    """

    backend: Backend = "auto"
    tile_size: int | None = None
    cache_memory: int | None = None
    precision: Precision = "native"
    compile: bool | None = None
    process_group: "dist.ProcessGroup | Literal['world'] | None" = None
    far_field: "float | Literal['auto'] | None" = "auto"

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, get_args(Backend))
        check_count("tile_size", self.tile_size, optional=True)
        if self.cache_memory is not None:
            check_number("cache_memory", self.cache_memory, "not be negative (bytes)", lambda number: number >= 0)
        check_choice("precision", self.precision, get_args(Precision))
        if self.compile is not None:
            check_flag("compile", self.compile)
        check_group(self.process_group)
        self._check_far_field()
        if self.backend == "keops":
            if self.process_group is not None:
                raise ValueError("backend='keops' does not work with a process_group: use backend='auto'.")
            require_pykeops()

    def _check_far_field(self) -> None:
        if self.far_field is None or self.far_field == "auto":
            return
        low, high = FAR_FIELD_TOLERANCES
        if not (isinstance(self.far_field, Real) and low <= float(self.far_field) <= high):
            raise ValueError(
                f"far_field must be None, 'auto' or a tolerance from {low:g} to {high:g}, got {self.far_field!r}."
            )
        if self.backend == "keops":
            raise ValueError(
                f"far_field={self.far_field} does not work with backend='keops', which evaluates all entries: use "
                "backend='auto', or far_field=None."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "KernelProducts":
        return self  # process groups cannot be copied

    def check(self, dtype: torch.dtype) -> None:
        """Raises ValueError for a dtype that is not supported, or not in this precision."""
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"Gaussian processes need float32 or float64, and the kernel or its inputs are {dtype}: call "
                "model.float(), and convert the data with .float()."
            )
        if self.precision == "float32" and dtype == torch.float32:
            raise ValueError(
                "precision='float32' is for float64 inputs, and these are float32 already: use precision='native', or "
                "convert model and data to float64."
            )

    def native(self, *, keeps_tiles: bool = True) -> "KernelProducts":
        """The same in the inputs' dtype, also inside solves."""
        return replace(self, precision="native", cache_memory=self.cache_memory if keeps_tiles else 0)

    def may_have_far_field(self, inputs: Tensor) -> bool:
        """Whether a symmetric matrix of inputs [n, d] may have a far field."""
        if self.far_field == "auto" and len(inputs) < FAR_FIELD_ROWS.on(inputs.device):
            return False
        return self.far_field is not None and inputs.numel() > 0

    def tile_rows(self, device: torch.device) -> int:
        """Rows of a tile."""
        if self.tile_size is not None:
            return self.tile_size
        if device.type != "cuda":
            return CPU_TILE
        room = torch.cuda.mem_get_info(device)[1] // CUDA_TILE_SHARE
        return next((size for size in CUDA_TILES if _SCRATCH_BYTES * size**2 <= room), CPU_TILE)

    def is_fused(self, device: torch.device, rows: int, *, symmetric: bool) -> bool:
        """Whether element-wise work is compiled; K(X*, X) has too few products."""
        if self.compile is not None:
            return self.compile
        is_worth_it = device.type == "cuda" and symmetric and rows >= FUSED_ROWS
        return is_worth_it and importlib.util.find_spec("triton") is not None

    def cache_budget(self, device: torch.device) -> int:
        """Bytes that a tile cache may take now."""
        if self.cache_memory is not None:
            return self.cache_memory
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0] // 2
        # "Available" includes file cache, "free" does not.
        budget = min(psutil.virtual_memory().available // 2, MAX_CPU_CACHE)
        return budget if self.process_group is None else budget // Ranks(self.process_group).on_this_machine

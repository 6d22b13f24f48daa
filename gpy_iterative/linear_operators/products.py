"""How products with a kernel matrix are computed: one frozen set of options for the whole package."""

import importlib.util
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from gpy_iterative.checks import check_count, check_number
from gpy_iterative.linear_operators.tiles.ranks import Ranks, check_group

try:
    import pykeops
except ImportError:
    pykeops = None

Backend = Literal["auto", "tiles", "keops"]
Precision = Literal["native", "float32"]
#: Between these a tolerance of a far field makes sense.
FAR_FIELD_TOLERANCES = (1e-9, 0.1)
#: Rows from which "auto" counts the entries of a far field. With fewer, measuring ranks costs more than the products that
#: it could save.
FAR_FIELD_ROWS = 4000

#: What an automatic tile cache may take at the most on a CPU, in bytes.
MAX_CPU_CACHE = 4 * 1024**3
#: Rows of a tile. On a CPU each thread's tile stays in its cache through the element-wise passes; on CUDA a tile has to be
#: large enough to outlast the start of a kernel, and its working memory is bounded by a part of the device's. Not of what
#: is free, which differs from step to step and from rank to rank: memory of kept tiles could not be used again, and ranks
#: would disagree.
CPU_TILE = 512
CUDA_TILES = (4096, 2048, 1024)
CUDA_TILE_SHARE = 32
#: Numbers of the largest dtype in the working memory of one row and column of a tile: two tiles, twice.
_SCRATCH_BYTES = 4 * 8


def require_pykeops() -> None:
    """Raises ImportError where pykeops is not installed."""
    if pykeops is None:
        raise ImportError(
            "KernelProducts(backend='keops') needs pykeops, which is not installed: pip install 'gpy_iterative[keops]', "
            "or leave backend='auto'."
        )


@dataclass(frozen=True)
class KernelProducts:
    """Options of the kernel products, accepted as `products=` by every mll and by `MatrixFreeKernel`.

    Args:
        backend: "tiles" evaluates square tiles with torch; "keops" compiles radial kernels to one loop (needs the extra
            `keops` and, at run time, a C++ compiler; other options then concern only dense blocks that a solver asks
            for); "auto" chooses by measurement, which today is tiles.
        tile_size: rows and columns of a tile; None is 512 on a CPU and up to 4,096 on CUDA, by the device's total memory.
            Ranks on devices of different sizes have to be given one.
        cache_memory: bytes for evaluated tiles that are kept for the next product, and where there is room for the
            derivatives of radial ones, which a training step's gradient takes; None is half of what is free (on a CPU at
            most 4 GB), 0 keeps none.
        precision: of the products inside an iterative solve. "native" computes in the inputs' dtype. "float32" is for
            float64 inputs: the iterations multiply float32 tiles, and iterative refinement reaches the tolerance in
            float64 at one float64 product a round. It serves the solves of a training step, of predictions, of sample
            paths and of Laplace's gradient. Gradients, log-determinants, variances, dense blocks, picked rows, the
            truncated series (`TruncatedCGMarginalLogLikelihood`, `RussianRouletteMarginalLogLikelihood`) and the products
            that find Laplace's mode stay in float64.
        compile: fuse the element-wise work of a tile with torch.compile, which needs a compiler at run time (on CUDA
            Triton). None does so on CUDA where Triton is installed; elsewhere the work is done pass by pass.
        process_group: the processes that share the tiles, each of which evaluates, keeps and multiplies its own: a
            `torch.distributed.ProcessGroup`, or "world" for the default one. Every rank runs the same program on the
            same data with the same seeds, and has the same results; one all-reduce of n s numbers completes a product
            with s columns. `cache_memory` is then a rank's own.
        far_field: products of radial kernels whose cost grows with n and not with n^2, for inputs of up to three dimensions
            (dimensions with long lengthscales do not count): blocks of points that are far from one another pass through
            a few points each. A number is the relative error that a product with random vectors may have, 1e-9 to .1;
            "auto" takes 1e-6, and 3e-7 at a million rows, on a CPU and 4,000 rows or more, where it evaluates less
            than half of the entries that tiles evaluate; None is tiles. Where the tolerance cannot be reached, or nothing
            would be saved, tiles are used. Single rows, columns and dense blocks are always exact.

    Raises:
        ValueError: an option outside its range; a process group that is not initialised, does not contain this process,
            or is asked to run KeOps. (A precision that the inputs' dtype does not allow is refused when a prior is read.)
        TypeError: a process group of another kind.
        ImportError: the backend is "keops", and pykeops is not installed.

    Examples:
        >>> products = gpi.linear_operators.KernelProducts(cache_memory=500_000_000)
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, products=products)
        >>> gpi.linear_operators.KernelProducts(tile_size=0)
        Traceback (most recent call last):
        ValueError: tile_size must be at least 1, got 0.
    """

    backend: Backend = "auto"
    tile_size: int | None = None
    cache_memory: int | None = None
    precision: Precision = "native"
    compile: bool | None = None
    process_group: "dist.ProcessGroup | Literal['world'] | None" = None
    far_field: "float | Literal['auto'] | None" = "auto"

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {self.backend!r}.")
        if self.tile_size is not None:
            check_count("tile_size", self.tile_size)
        if self.cache_memory is not None:
            check_number("cache_memory", self.cache_memory, "not be negative (bytes)", lambda number: number >= 0)
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}.")
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
        return self  # frozen; and process groups cannot be copied

    def check(self, dtype: torch.dtype) -> None:
        """Raises ValueError where kernels of this dtype cannot be computed, or not in this precision."""
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

    def may_have_far_field(self, inputs: Tensor) -> bool:
        """Whether a symmetric kernel matrix of inputs [n, d] may have one: "auto" on CUDA is not measured yet."""
        if self.far_field == "auto" and (len(inputs) < FAR_FIELD_ROWS or inputs.device.type != "cpu"):
            return False
        return self.far_field is not None and inputs.numel() > 0

    def ranks(self) -> Ranks | None:
        """The processes that share the tiles; None where there is only this one."""
        return None if self.process_group is None else Ranks(self.process_group)

    def tile_rows(self, device: torch.device) -> int:
        """Rows and columns of a tile on this device."""
        if self.tile_size is not None:
            return self.tile_size
        if device.type != "cuda":
            return CPU_TILE
        room = torch.cuda.mem_get_info(device)[1] // CUDA_TILE_SHARE
        return next((size for size in CUDA_TILES if _SCRATCH_BYTES * size**2 <= room), CPU_TILE)

    def is_fused(self, device: torch.device) -> bool:
        """Whether the element-wise work of a tile is compiled to one loop on this device."""
        if self.compile is not None:
            return self.compile
        return device.type == "cuda" and importlib.util.find_spec("triton") is not None

    def cache_budget(self, device: torch.device) -> int:
        """Bytes that a tile cache on this device may take now."""
        if self.cache_memory is not None:
            return self.cache_memory
        if device.type == "cuda":
            return torch.cuda.mem_get_info(device)[0] // 2
        # What is available, pages that only cache files included; not what nobody uses.
        budget, ranks = min(psutil.virtual_memory().available // 2, MAX_CPU_CACHE), self.ranks()
        return budget if ranks is None else budget // ranks.on_this_machine

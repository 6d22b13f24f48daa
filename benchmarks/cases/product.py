"""The kernel product alone: our tiles, KeOps, GPyTorch, plain row blocks, and the bound that the GEMMs set."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gpytorch
import torch
import typer
from pykeops.torch import Genred
from torch import Tensor

from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenDevice,
    Threads,
    app,
    console,
    finish,
    memory_cell,
    names_of,
    run_contenders,
    succeeded,
)
from benchmarks.devices import Device, clock, free_memory, peak_memory
from benchmarks.models import matern_kernel
from benchmarks.plots import plt, save_figure
from benchmarks.runner import Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32

CASE = "product"
BOUND = "GEMMs alone"
KEPT_BOUND = "product's GEMMs alone"
#: Rows that the plain loop takes at a time.
BLOCK = 1000

#: From x [n, d] and v [n, s] to a function that computes the product [n, s], or as much work.
Prepare = Callable[[Tensor, Tensor], Callable[[], object]]


class Dtype(StrEnum):
    """Of data and products."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


def problem(n: int, d: int, s: int, dtype: str = "float32", device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Inputs [n, d] at distances of about a lengthscale, and right-hand sides [n, s]."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda columns: torch.randn(n, columns, generator=generator, dtype=getattr(torch, dtype))
    return (normal(d) / d**0.5).to(device), normal(s).to(device)


def _ours(products: KernelProducts) -> Prepare:
    def prepare(x: Tensor, v: Tensor) -> Callable[[], Tensor]:
        operator = RadialKernelLinearOperator(x, x.new_ones(()), function=MATERN32, products=products)
        return lambda: operator._matmul(v)

    return prepare


def derivative(x: Tensor, v: Tensor) -> Callable[[], object]:
    """The gradient pass of a training step: of sum_k v_k^T K w_k with respect to inputs and outputscale."""
    products = KernelProducts(cache_memory=0, compile=False)
    operator = RadialKernelLinearOperator(
        x.clone().requires_grad_(), x.new_ones((), requires_grad=True), function=MATERN32, products=products
    )
    other = v.roll(1, 0)
    without_graph = torch.no_grad()(operator._bilinear_derivative)  # as in a backward pass
    return lambda: without_graph(v, other)


def bound(x: Tensor, v: Tensor, *, distances: bool = True) -> Callable[[], Tensor]:
    """Distances and product over all n^2 entries, in the same tiles, with no element-wise work.

    Without distances, the product with a single tile of ones, which stays in the processor's cache.
    """
    n, size = len(x), KernelProducts().tile_rows(x.device)
    tile, result = x.new_ones(size, size), torch.zeros_like(v)

    def run() -> Tensor:
        result.zero_()
        for i in range(0, n, size):
            for j in range(0, n, size):
                left, right = x[i : i + size], x[j : j + size]
                out = tile[: len(left), : len(right)]
                if distances:
                    out = tile if out.shape == tile.shape else x.new_empty(out.shape)
                    torch.matmul(left, right.mT, out=out)
                result[i : i + size].addmm_(out, v[j : j + size])
        return result

    return run


def row_blocks(x: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """What one would write first: all columns at once, a thousand rows at a time."""
    result = torch.empty_like(v)

    def run() -> Tensor:
        for start in range(0, len(x), BLOCK):
            r = torch.cdist(x[start : start + BLOCK], x) * 3**0.5
            result[start : start + BLOCK] = ((1 + r) * torch.exp(-r)) @ v
        return result

    return run


def stock(x: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """GPyTorch's kernel, which evaluates the whole matrix."""
    kernel: gpytorch.kernels.Kernel = matern_kernel(x)
    return lambda: kernel(x) @ v


def keops(x: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """KeOps' generated loop over the same formula, as its users write it."""
    formula = "(IntCst(1)+Sqrt(IntCst(3)*SqDist(x,y)))*Exp(-Sqrt(IntCst(3)*SqDist(x,y)))*v"
    variables = [f"x=Vi({x.shape[-1]})", f"y=Vj({x.shape[-1]})", f"v=Vj({v.shape[-1]})"]
    product = Genred(formula, variables, reduction_op="Sum", axis=1)
    return lambda: product(x, x, v, backend="GPU" if x.is_cuda else "CPU")


PRODUCTS: dict[str, Prepare] = {
    "tiles": _ours(KernelProducts(cache_memory=0, compile=False)),
    "tiles, compiled": _ours(KernelProducts(cache_memory=0, compile=True)),
    "tiles, kept": _ours(KernelProducts()),
    "tiles, derivative": derivative,
    "our KeOps backend": _ours(KernelProducts(backend="keops")),
    BOUND: bound,
    KEPT_BOUND: partial(bound, distances=False),
    "row blocks": row_blocks,
    "GPyTorch": stock,
    "KeOps": keops,
}


def reference(name: str) -> str:
    """What a contender is held against: its bound, and a gradient pass against a product."""
    if name == "tiles, derivative":
        return "tiles"
    return KEPT_BOUND if name in ("tiles, kept", KEPT_BOUND) else BOUND


def measure(name: str, *, n: int, d: int, s: int, repeats: int, dtype: str = "float32", device: str = "cpu") -> Outcome:
    """Seconds of each repetition, after one that is not measured, and those of its reference over them.

    They take turns, so that a machine whose speed drifts does not change their ratio, of which the median is kept.
    Memory is that of the first repetition, before there is a reference.
    """
    x, v = problem(n, d, s, dtype, device)

    def seconds(compute: Callable[[], object]) -> float:
        start = clock(device)
        compute()
        return clock(device) - start

    with torch.no_grad():
        run = PRODUCTS[name](x, v)
        run()
        memory = peak_memory()
        held_against = PRODUCTS[reference(name)](x, v)
        held_against()
        pairs = [(seconds(run), seconds(held_against)) for _ in range(repeats)]
    times, ratio = [own for own, _ in pairs], statistics.median(other / own for own, other in pairs)
    return {"seconds": times, "best": min(times), "reference_ratio": ratio, **memory}


for _name in PRODUCTS:
    contender(CASE, _name)(partial(measure, _name))


def needed_memory(name: str, n: int, dtype: str, device: str) -> float:
    """Bytes that grow with n beside inputs and result; the other contenders work in tiles and keep none.

    Row blocks and GPyTorch hold four such matrices at their peak, as measured; a fifth is to spare.
    """
    tile = KernelProducts().tile_rows(torch.device(device))
    numbers = {"tiles, kept": n * (n + tile) / 2, "row blocks": 5 * BLOCK * n, "GPyTorch": 5 * n**2}
    return numbers.get(name, 0) * getattr(torch, dtype).itemsize


def has_room(name: str, n: int, dtype: str, device: str) -> bool:
    """Whether there is memory for it now; for kept tiles, whether all of them would be kept."""
    kept = name == "tiles, kept"
    room = KernelProducts().cache_budget(torch.device(device)) if kept else free_memory(device)
    return needed_memory(name, n, dtype, device) <= room


@app.command()
def product(
    n: Annotated[list[int] | None, typer.Option(min=1, help="Rows, once a number; 15,000 by default.")] = None,
    d: Annotated[int, typer.Option(min=1)] = 26,
    s: Annotated[list[int] | None, typer.Option(min=1, help="Columns, once a number; 1 and 65 by default.")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    dtype: Dtype = Dtype.FLOAT32,
    device: ChosenDevice = Device.CPU,
    only: Annotated[list[str] | None, names_of(PRODUCTS, "Contenders, by name; all by default.")] = None,
    picture: Annotated[Path | None, typer.Option(help="File of a picture: seconds against rows.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """The kernel product alone, beside its bound, KeOps and GPyTorch."""
    rows, columns = n or [15_000], s or [1, 65]
    options = {"d": d, "repeats": repeats, "dtype": dtype, "device": device}
    outcomes: dict[tuple[int, int], dict[str, Outcome]] = {}
    for size in itertools.product(rows, columns):
        names = [name for name in only or PRODUCTS if has_room(name, size[0], dtype, device)]
        for name in [name for name in only or PRODUCTS if name not in names]:
            gigabytes = needed_memory(name, size[0], dtype, device) / 1e9
            console.print(f"[yellow]{name}: no room for {gigabytes:.1f} GB at n = {size[0]:,}; left out.[/yellow]")
        shape = {"n": size[0], "s": size[1], **options}
        outcomes[size] = run_contenders(CASE, names, threads=threads, **shape)
        console.print(table(succeeded(outcomes[size]), shape).for_terminal())
    if picture is not None:
        console.print(f"drew {draw({size: succeeded(found) for size, found in outcomes.items()}, picture)}")
    named = {f"n={size[0]} s={size[1]}": found for size, found in outcomes.items()}
    finish(CASE, {"n": rows, "s": columns, **options}, threads, device=device, outcomes=named)


def table(outcomes: Mapping[str, Outcome], options: Mapping[str, Any]) -> Table:
    """A row a contender, with the times of its reference and of KeOps over its own."""
    keops_best = outcomes["KeOps"]["best"] if "KeOps" in outcomes else math.nan
    title = "n = {n}, d = {d}, {s} right-hand sides, {dtype}, {device}"
    return Table(
        title.format(**{"dtype": "float32", "device": "cpu"} | dict(options)),
        ["contender", "s", "reference", "reference / s", "KeOps / s", "MB"],
        [
            [
                name,
                f"{o['best']:.3g}",
                reference(name),
                f"{o.get('reference_ratio', math.nan):.2f}",  # not told by earlier versions
                f"{keops_best / o['best']:.2f}",
                memory_cell(o),
            ]
            for name, o in outcomes.items()
        ],
    )


def draw(outcomes: Mapping[tuple[int, int], Mapping[str, Outcome]], path: Path) -> Path:
    """Seconds against rows, both axes logarithmic: a panel for each number of columns, a line a contender."""
    columns = list(dict.fromkeys(s for _, s in outcomes))
    figure, panels = plt.subplots(
        1, len(columns), figsize=(4.5 * len(columns), 3.5), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, s in zip(panels[0], columns, strict=True):
        for name in PRODUCTS:
            points = sorted(
                (n, found[name]["best"]) for (n, of), found in outcomes.items() if of == s and name in found
            )
            if points:
                line = {BOUND: "--", KEPT_BOUND: ":"}.get(name)
                style = {"marker": "o", "markersize": 3} if line is None else {"color": "black", "linestyle": line}
                panel.plot(*zip(*points, strict=True), label=name, **style)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("rows")
        panel.set_title("one column" if s == 1 else f"{s} columns")
    panels[0][0].set_ylabel("seconds")
    panels[0][-1].legend(fontsize=6)
    return save_figure(figure, path)


#: Options of the presets, and their numbers of columns.
SIZES: dict[Preset, tuple[dict[str, int], tuple[int, ...]]] = {
    Preset.SMOKE: ({"n": 1000, "d": 5, "repeats": 1}, (5,)),
    Preset.QUICK: ({"n": 10_000, "d": 26, "repeats": 5}, (1, 65)),
    Preset.PAPER: ({"n": 15_000, "d": 26, "repeats": 5}, (1, 65)),
}


def _runs(preset: Preset) -> list[Run]:
    options, columns = SIZES[preset]
    return [Run(CASE, name, {**options, "s": s}) for s in columns for name in PRODUCTS]


def _tables(found: Sequence[Measured]) -> list[Table]:
    by_columns: dict[int, list[Measured]] = {}
    for measured in found:
        by_columns.setdefault(measured.run.options["s"], []).append(measured)
    return [
        table({measured.run.contender: measured.outcome for measured in group}, group[0].run.options)
        for group in by_columns.values()
    ]


register(
    Case(
        CASE,
        "The kernel product alone, beside the bound that its GEMMs set, KeOps and GPyTorch.",
        _runs,
        _tables,
        note="[Measured](measured.md#the-kernel-product) has a larger run.",
        shows_tables=False,
    )
)

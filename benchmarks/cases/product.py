"""The kernel product alone: our tiles, KeOps, plain row blocks, and the bound that the GEMMs set."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pykeops.torch import Genred
from torch import Tensor

from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, finish, run_contenders, succeeded
from benchmarks.runner import CONTENDERS, Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial_functions import MATERN32


def problem(n: int, d: int, s: int) -> tuple[Tensor, Tensor]:
    """Inputs [n, d] at distances of about a lengthscale, and right-hand sides [n, s], in float32."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, d, generator=generator) / d**0.5, torch.randn(n, s, generator=generator)


def _seconds(function: Callable[[], object], repeats: int) -> Outcome:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return {"seconds": times, "best": min(times)}


def _ours(products: KernelProducts) -> Callable[..., Outcome]:
    def run(n: int, d: int, s: int, repeats: int) -> Outcome:
        x, v = problem(n, d, s)
        operator = RadialKernelLinearOperator(x, torch.tensor(1.0), function=MATERN32, products=products)
        with torch.no_grad():
            return _seconds(lambda: operator._matmul(v), repeats)

    return run


contender("product", "tiles")(_ours(KernelProducts(cache_memory=0)))
contender("product", "tiles, compiled")(_ours(KernelProducts(cache_memory=0, compile=True)))
contender("product", "tiles, kept")(_ours(KernelProducts()))
contender("product", "our KeOps backend")(_ours(KernelProducts(backend="keops")))


@contender("product", "bound: GEMMs alone")
def bound(n: int, d: int, s: int, repeats: int) -> Outcome:
    """Distances and product over all n^2 entries, in the same tiles, with no element-wise work."""
    x, v = problem(n, d, s)
    size = KernelProducts().tile_rows(x.device)
    tile, result = torch.empty(size, size), torch.zeros(n, s)

    def run() -> None:
        result.zero_()
        for i in range(0, n, size):
            for j in range(0, n, size):
                left, right = x[i : i + size], x[j : j + size]
                out = tile if left.shape[0] == right.shape[0] == size else torch.empty(left.shape[0], right.shape[0])
                torch.matmul(left, right.mT, out=out)
                result[i : i + size].addmm_(out, v[j : j + size])

    return _seconds(run, repeats)


@contender("product", "row blocks")
def row_blocks(n: int, d: int, s: int, repeats: int) -> Outcome:
    """What one would write first: all columns at once, a thousand rows at a time."""
    x, v = problem(n, d, s)

    result = torch.empty(n, s)

    def run() -> None:
        for start in range(0, n, 1000):
            r = torch.cdist(x[start : start + 1000], x) * 3**0.5
            result[start : start + 1000] = ((1 + r) * torch.exp(-r)) @ v

    return _seconds(run, repeats)


@contender("product", "KeOps")
def keops(n: int, d: int, s: int, repeats: int) -> Outcome:
    """KeOps' generated loop over the same formula, as its users write it."""
    x, v = problem(n, d, s)
    formula = "(IntCst(1)+Sqrt(IntCst(3)*SqDist(x,y)))*Exp(-Sqrt(IntCst(3)*SqDist(x,y)))*v"
    product = Genred(formula, [f"x=Vi({d})", f"y=Vj({d})", f"v=Vj({s})"], reduction_op="Sum", axis=1)
    return _seconds(lambda: product(x, x, v, backend="CPU"), repeats)


CASE = "product"


@app.command()
def product(n: int = 15_000, d: int = 26, s: int = 65, repeats: int = 5, threads: Threads = DEFAULT_THREADS) -> None:
    """The kernel product alone, beside its bound and KeOps."""
    options = {"n": n, "d": d, "s": s, "repeats": repeats}
    outcomes = run_contenders(CASE, list(CONTENDERS[CASE]), threads=threads, **options)
    console.print(table(succeeded(outcomes), options).for_terminal())
    finish("product", options, threads, outcomes=outcomes)


def table(outcomes: Mapping[str, Outcome], options: Mapping[str, Any]) -> Table:
    """A row a contender, with the bound over its time."""
    floor = outcomes["bound: GEMMs alone"]["best"] if "bound: GEMMs alone" in outcomes else math.nan
    return Table(
        "n = {n}, d = {d}, {s} right-hand sides, float32".format(**options),
        ["contender", "s", "bound / s", "MB"],
        [
            [name, f"{o['best']:.3f}", f"{floor / o['best']:.2f}", f"{o['peak_memory_mb']:.0f}"]
            for name, o in outcomes.items()
        ],
    )


SIZES = {
    Preset.SMOKE: {"n": 1000, "d": 5, "s": 5, "repeats": 1},
    Preset.QUICK: {"n": 10_000, "d": 26, "s": 65, "repeats": 3},
    Preset.PAPER: {"n": 15_000, "d": 26, "s": 65, "repeats": 5},
}


def _tables(found: Sequence[Measured]) -> list[Table]:
    return [table({measured.run.contender: measured.outcome for measured in found}, found[0].run.options)]


register(
    Case(
        CASE,
        "The kernel product alone, beside the bound that its GEMMs set and KeOps.",
        lambda preset: [Run(CASE, name, SIZES[preset]) for name in CONTENDERS[CASE]],
        _tables,
    )
)

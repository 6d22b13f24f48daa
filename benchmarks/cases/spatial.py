"""Products of data in one to three dimensions through far fields: time against rows, beside tiles, and the error."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenDevice,
    Threads,
    app,
    console,
    finish,
    memory_cell,
    run_contenders,
    succeeded,
)
from benchmarks.devices import Device, clock, peak_memory
from benchmarks.runner import Outcome, contender
from benchmarks.tables import Table
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.extensions import far_field_error
from gpy_iterative.linear_operators.far_field.radial import RadialFarField
from gpy_iterative.linear_operators.radial.functions import MATERN32

CASE = "spatial"
#: Rows whose products are compared with exact ones in float64.
CHECKED_ROWS = 200
#: Roads along which clustered points lie.
ROADS = 30


class Layout(StrEnum):
    """How the points lie in [-2, 2]^d."""

    UNIFORM = "uniform"
    ROADS = "roads"


def points(n: int, d: int, layout: str = "uniform") -> Tensor:
    """Points [n, d] in float64, uniform or close to a few straight lines."""
    generator = torch.Generator().manual_seed(0)
    if layout == Layout.UNIFORM:
        return 4 * torch.rand(n, d, generator=generator, dtype=torch.float64) - 2
    ends = 4 * torch.rand(2, ROADS, d, generator=generator, dtype=torch.float64) - 2
    road = torch.randint(ROADS, (n,), generator=generator)
    along = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    beside = 0.01 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return ends[0, road] * along + ends[1, road] * (1 - along) + beside


@dataclass(frozen=True)
class Problem:
    """Scaled inputs [n, d] and right-hand sides [n, s] in float32."""

    x: Tensor
    v: Tensor

    def operator(self, rows: int | None = None, *, learns: bool = False, **options: Any) -> RadialKernelLinearOperator:
        """The Matern-3/2 matrix of the first rows."""
        x = self.x[:rows].clone().requires_grad_(learns)
        products = KernelProducts(**options)
        return RadialKernelLinearOperator(x, x.new_ones(()), function=MATERN32, products=products)


@contender(CASE, "far field")
def measure(
    *,
    n: int,
    d: int,
    s: int,
    lengthscale: float,
    layout: str,
    tolerance: float,
    tiles_rows: int,
    repeats: int,
    device: str = "cpu",
) -> Outcome:
    """Seconds of products and gradient passes, in turns with tiles, which are extrapolated beyond `tiles_rows` rows."""
    generator = torch.Generator().manual_seed(1)
    x, v = (points(n, d, layout) / lengthscale).float(), torch.randn(n, s, generator=generator)
    problem = Problem(x.to(device), v.to(device))
    field = problem.operator(far_field=tolerance, cache_memory=0)
    rows = min(n, tiles_rows)
    with torch.no_grad():
        setup, error = _seconds(lambda: far_field_error(field), device)
        found: Outcome = {"setup": setup, "measured_error": error, "entries": _entries(field)}
        if error is None:
            return found
        found |= {"product_error": _error(field, problem, lengthscale), **peak_memory()}
        times = _turns(problem, field, rows, repeats)
    scale = (n / rows) ** 2
    times["tiles"] = [seconds * scale for seconds in times["tiles"]]
    return found | times | {"is_extrapolated": rows < n, **peak_memory()}


def _turns(problem: Problem, field: RadialKernelLinearOperator, rows: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every repetition, after one that is not measured."""
    tiles, v = problem.operator(rows, far_field=None, cache_memory=0), problem.v
    gradient, other = problem.operator(learns=True, far_field=field.products.far_field, cache_memory=0), v.roll(1, 0)
    kept = problem.operator(far_field=field.products.far_field)
    computed: dict[str, Callable[[], object]] = {
        "product": lambda: field._matmul(v),
        "tiles": lambda: tiles._matmul(v[:rows]),
        "gradient": lambda: gradient._bilinear_derivative(v, other),
    }
    if 4 * _entries(field) <= KernelProducts().cache_budget(v.device):
        computed["kept"] = lambda: kept._matmul(v)
    for compute in computed.values():
        compute()
    device = str(v.device)
    every = [{name: _seconds(compute, device)[0] for name, compute in computed.items()} for _ in range(repeats)]
    return {name: [seconds[name] for seconds in every] for name in computed}


def _seconds(compute: Callable[[], Any], device: str) -> tuple[float, Any]:
    start = clock(device)
    result = compute()
    return clock(device) - start, result


def _entries(operator: RadialKernelLinearOperator) -> int:
    """Entries that a product evaluates; of tiles where there is no far field."""
    tiles = operator.tiles()
    field = tiles.far_field() if isinstance(tiles, RadialFarField) else None
    if field is None:
        return operator.shape[-1] ** 2 // 2
    return sum(batch.shape.numel() for batch in field.levels.batches)


def _error(field: RadialKernelLinearOperator, problem: Problem, lengthscale: float) -> float:
    """Of the product, relative, on some rows."""
    drawn = torch.randperm(len(problem.x), generator=torch.Generator().manual_seed(2))
    rows = drawn[:CHECKED_ROWS].to(problem.x.device)
    exact = Problem(problem.x.double(), problem.v.double()).operator(cache_memory=0)
    true = exact.rows_matmul(rows, problem.v.double())
    return float((field._matmul(problem.v)[rows] - true).norm() / true.norm())


def best(outcome: Outcome, name: str) -> float:
    """The shortest repetition; NaN where there is none."""
    return min(outcome.get(name, [math.nan]))


def table(outcomes: Mapping[int, Outcome], title: str) -> Table:
    """A row for each number of rows, with the slope of time against rows from the one before."""
    rows, before = [], None
    for n, outcome in outcomes.items():
        product = best(outcome, "product")
        slope = math.nan if before is None else math.log(product / before[1]) / math.log(n / before[0])
        before = n, product
        mark = "~" if outcome.get("is_extrapolated") else ""
        cells = [f"{n:,}", f"{outcome['setup']:.2f}", f"{product:.3g}", f"{best(outcome, 'kept'):.3g}"]
        cells += [f"{best(outcome, 'gradient') / product:.2f}", f"{mark}{best(outcome, 'tiles'):.3g}"]
        cells += [f"{mark}{ratio(outcome):.1f}", f"{slope:.2f}", f"{outcome.get('product_error', math.nan):.1e}"]
        rows.append([*cells, f"{2 * outcome['entries'] / n:,.0f}", memory_cell(outcome)])
    heads = ["n", "setup s", "product s", "kept s", "gradient / product", "tiles s", "tiles / product", "slope"]
    return Table(title, [*heads, "error", "entries / n", "MB"], rows)


def ratio(outcome: Outcome) -> float:
    """Tiles over product: the median of the repetitions, each of which measured both."""
    pairs = zip(outcome.get("tiles", []), outcome.get("product", []), strict=False)
    return statistics.median([tiles / product for tiles, product in pairs] or [math.nan])


@app.command()
def spatial(
    n: Annotated[list[int] | None, typer.Option(min=1, help="Rows; 10,000, 100,000 and 1,000,000 by default.")] = None,
    d: Annotated[list[int] | None, typer.Option(min=1, help="Dimensions; 1, 2 and 3 by default.")] = None,
    s: Annotated[int, typer.Option(min=1, help="Right-hand sides.")] = 17,
    lengthscale: Annotated[float, typer.Option(help="The inputs lie in [-2, 2]^d.")] = 0.5,
    layout: Layout = Layout.UNIFORM,
    tolerance: float = 1e-5,
    tiles_rows: Annotated[int, typer.Option(min=1, help="Tiles are measured up to so many rows.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    device: ChosenDevice = Device.CPU,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Products of spatial data through a far field, beside tiles."""
    sizes, dimensions = n or [10_000, 100_000, 1_000_000], d or [1, 2, 3]
    options = {"s": s, "lengthscale": lengthscale, "layout": layout.value, "tolerance": tolerance, "repeats": repeats}
    options |= {"device": device.value}
    outcomes: dict[str, Outcome] = {}
    for dimension in dimensions:
        shown = {}
        for size in sizes:
            given = {"n": size, "d": dimension, "tiles_rows": tiles_rows, **options}
            found = run_contenders(CASE, ["far field"], threads=threads, **given)
            outcomes[f"n={size} d={dimension}"] = found["far field"]
            outcome = succeeded(found).get("far field", {})
            if outcome.get("measured_error") is not None:
                shown[size] = outcome
        title = f"d = {dimension}, {layout.value}, lengthscale {lengthscale:g}, {s} columns, tolerance {tolerance:g}"
        console.print(table(shown, title).for_terminal())
    finish(
        CASE,
        {"n": sizes, "d": dimensions, "tiles_rows": tiles_rows, **options},
        threads,
        device=device,
        outcomes=outcomes,
    )

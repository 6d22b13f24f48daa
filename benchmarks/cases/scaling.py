"""Products and training steps that several processes share, and what they tell each other for it."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.cases.product import problem
from benchmarks.command_line import DEFAULT_THREADS, ChosenData, FirstRows, app, finish, run_contenders, show
from benchmarks.datasets import load
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender
from benchmarks.training import take_step
from gpy_iterative.linear_operators import KernelProducts, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32

#: What is measured with each number of processes.
MEASURED = ("product", "product, kept tiles", "derivative", "training step")


def size_of(name: str, options: dict[str, Any]) -> str:
    """Of one of them, in words."""
    if name == "training step":
        return f"{options['dataset']}, {options['rows'] or 'all'} rows"
    return f"n = {options['n']}, d = {options['d']}, {options['s']} columns"


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The bytes of every message that this process contributes to a sum over all."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counting(message: Tensor, **options: Any) -> Any:
        sizes.append(message.numel() * message.element_size())
        return all_reduce(message, **options)

    with mock.patch.object(dist, "all_reduce", counting):
        yield sizes


def _measured(function: Callable[[], object], repeats: int, group: Any) -> Outcome:
    """Seconds and bytes, after a first call that is not measured."""
    function()
    seconds = []
    with counted_bytes() as sizes:
        for _ in range(repeats):
            if group is not None:
                dist.barrier(None if group == "world" else group)
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "bytes": sum(sizes) / repeats, "messages": len(sizes) / repeats}


def measured_products(group: Any, n: int, d: int, s: int, repeats: int) -> dict[str, Outcome]:
    """Products that evaluate tiles, products of kept ones, and the derivative."""
    x, v = problem(n, d, s)
    found = {}
    for name, cache_memory in (("product", 0), ("product, kept tiles", None)):
        products = KernelProducts(cache_memory=cache_memory, process_group=group)
        operator = RadialKernelLinearOperator(x, torch.tensor(1.0), function=MATERN32, products=products)
        with torch.no_grad():
            found[name] = _measured(lambda operator=operator: operator._matmul(v), repeats, group)
    operator = RadialKernelLinearOperator(
        x.requires_grad_(),
        torch.tensor(1.0),
        function=MATERN32,
        products=KernelProducts(cache_memory=0, process_group=group),
    )
    with torch.no_grad():  # as in a backward pass
        found["derivative"] = _measured(lambda: operator._bilinear_derivative(v, v), repeats, group)
    return found


def _training_step(group: Any, dataset: str, rows: int | None, steps: int) -> Outcome:
    data = load(dataset, 0, rows=rows)
    model = MaternRegression(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    products = KernelProducts(process_group=group)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, products=products, generator=0)

    outcome = _measured(lambda: take_step(model, mll, optimizer, data), steps, group)
    return outcome | {"rows": len(data.train_y), "parameters": model.flat_parameters().tolist()}


def _rank(rank: int, size: int, threads: int, folder: str, end: Connection, options: dict[str, Any]) -> None:
    torch.set_num_threads(threads)
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'store'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=10),
        )
    group = "world" if size > 1 else None
    found = measured_products(group, options["n"], options["d"], options["s"], options["repeats"])
    found["training step"] = _training_step(group, options["dataset"], options["rows"], options["steps"])
    end.send(found)
    if size > 1:
        dist.destroy_process_group()


@contender("scaling", "shared tiles")
def shared(processes: int, threads_together: int, **options: Any) -> Outcome:
    """So many processes that have so many threads together; the slowest process of each is reported."""
    context = multiprocessing.get_context("spawn")
    threads = max(threads_together // processes, 1)
    with tempfile.TemporaryDirectory() as folder:
        ends, started = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, processes, threads, folder, theirs, options))
            process.start()
            theirs.close()
            ends.append(ours)
            started.append(process)
        every = [end.recv() for end in ends]
        for process in started:
            process.join()
    outcome: Outcome = {"threads_each": threads}
    for name, first in every[0].items():
        slowest = [max(times) for times in zip(*(found[name]["seconds"] for found in every), strict=True)]
        outcome[name] = first | {"seconds": slowest, "best": min(slowest), "mean": sum(slowest) / len(slowest)}
    if any(found["training step"]["parameters"] != every[0]["training step"]["parameters"] for found in every):
        raise RuntimeError("The processes ended with different parameters.")
    return outcome


@app.command()
def scaling(
    more: Annotated[
        list[int] | None, typer.Argument(help="Further numbers of processes, as in --processes 1 2.")
    ] = None,
    processes: Annotated[
        list[int] | None, typer.Option(help="Numbers of processes to compare; 1 and 2 by default.")
    ] = None,
    n: int = 15_000,
    d: int = 26,
    s: int = 65,
    repeats: int = 5,
    dataset: ChosenData = "elevators",
    rows: FirstRows = None,
    steps: int = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of all processes together.")] = DEFAULT_THREADS,
) -> None:
    """Products and a training step that several processes share, and the bytes that each contributes to sums."""
    options = {"n": n, "d": d, "s": s, "repeats": repeats, "dataset": dataset, "rows": rows, "steps": steps}
    with_threads = options | {"threads": 1, "threads_together": threads}
    counts = [*(processes or []), *(more or [])] or [1, 2]
    outcomes = {
        str(count): run_contenders("scaling", ["shared tiles"], processes=count, **with_threads)["shared tiles"]
        for count in counts
    }
    good = {count: outcome for count, outcome in outcomes.items() if "error" not in outcome}
    for name in MEASURED if good else []:
        first = next(iter(good.values()))[name]["best"]
        show(
            f"{name}: {size_of(name, options)}, float32, {threads} threads together",
            ["processes", "threads each", "s", "ratio", "sums", "bytes", "bytes / (4 n s)"],
            [
                [
                    count,
                    str(o["threads_each"]),
                    f"{o[name]['best']:.3f}",
                    f"{o[name]['best'] / first:.2f}",
                    f"{o[name]['messages']:.0f}",
                    f"{o[name]['bytes']:,.0f}",
                    f"{o[name]['bytes'] / (4 * n * s):.2f}" if "step" not in name else "",
                ]
                for count, o in good.items()
            ],
        )
    finish("scaling", options | {"processes": counts}, threads, outcomes=outcomes)

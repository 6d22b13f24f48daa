"""Memory is linear in n: one product and one step of a solve with nothing kept."""

import time

import torch

import gpy_iterative as gpi
from benchmarks.command_line import DEFAULT_THREADS, Threads, app, console, finish, run_contenders, succeeded_or_exit
from benchmarks.runner import Outcome, contender
from gpy_iterative.linear_operators import KernelProducts, NoisyLinearOperator, RadialKernelLinearOperator
from gpy_iterative.linear_operators.radial.functions import MATERN32


@contender("memory", "ours")
def product_and_step(*, n: int, d: int, columns: int) -> Outcome:
    """A product with all columns, then one iteration of conjugate gradients."""
    generator = torch.Generator().manual_seed(0)
    x, rhs = torch.randn(n, d, generator=generator), torch.randn(n, columns, generator=generator)
    kernel = RadialKernelLinearOperator(
        x, torch.tensor(1.0), function=MATERN32, products=KernelProducts(cache_memory=0)
    )
    operator = NoisyLinearOperator(kernel, torch.full((n,), 0.1))
    start = time.perf_counter()
    with torch.no_grad():
        operator._matmul(rhs)
    product = time.perf_counter() - start
    solver = gpi.solvers.ConjugateGradients(max_epochs=1, preconditioner=None)
    solution = solver.solve(operator, rhs)
    return {"seconds_product": product, "seconds_step": solution.stats.seconds}


@app.command()
def memory(n: int = 200_000, d: int = 8, columns: int = 17, threads: Threads = DEFAULT_THREADS) -> None:
    """Peak memory of one product and one solver step with the tile cache off."""
    options = {"n": n, "d": d, "columns": columns}
    outcome = succeeded_or_exit(run_contenders("memory", ["ours"], threads=threads, **options))["ours"]
    console.print(outcome)
    finish("memory", options, threads, outcome=outcome)

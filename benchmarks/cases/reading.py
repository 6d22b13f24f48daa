"""What a reader of one warm training step has to open: files, functions, and switches from file to file."""

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import torch
import typer

import gpy_iterative as gpi
from benchmarks.command_line import app, console, finish, show
from benchmarks.datasets import Split
from benchmarks.models import MaternRegression

PACKAGE = Path(gpi.__file__).parent
#: Comprehensions and lambdas are read where they stand.
PARTS_OF_FUNCTIONS = ("<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")


class Walk:
    """Counts the package's functions as they are entered, and the calls that lead from one file to another."""

    def __init__(self) -> None:
        self.functions: Counter[CodeType] = Counter()
        self.switches = 0

    def __enter__(self) -> "Walk":
        sys.setprofile(self._entered)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _entered(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        if frame.f_code.co_name not in PARTS_OF_FUNCTIONS:
            self.functions[frame.f_code] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(PACKAGE)):
            caller = caller.f_back
        self.switches += caller is not None and caller.f_code.co_filename != frame.f_code.co_filename

    def files(self) -> Counter[str]:
        """Functions entered, by file."""
        return Counter(str(Path(code.co_filename).relative_to(PACKAGE)) for code in self.functions)


def walk_through_step(*, n: int, posterior: bool) -> Walk:
    """One training step, forward and backward, after two others; on one thread, as a debugger would go."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, generator=generator)
    y = torch.sin(6 * x).sum(-1) + 0.1 * torch.randn(n, generator=generator)
    data = Split("reading", x, y, x[:10], y[:10])
    model = MaternRegression(data)
    solver = gpi.solvers.AlternatingProjections()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, solver=solver, generator=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        (-mll(model(data.train_x), data.train_y)).backward()
        optimizer.step()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step()
        step()
        with Walk() as walk:
            step()
            if posterior:
                with torch.no_grad():
                    model.likelihood(mll.posterior()(data.test_x)).variance.sum()
    finally:
        torch.set_num_threads(threads)
    return walk


@app.command()
def reading(
    n: int = 1_200,
    posterior: Annotated[bool, typer.Option(help="And predictions at ten points.")] = False,
    functions: Annotated[bool, typer.Option(help="List the functions, too.")] = False,
) -> None:
    """Files, functions and switches of file of one warm training step, forward and backward."""
    walk = walk_through_step(n=n, posterior=posterior)
    files = walk.files()
    show("one warm training step", ["file", "functions"], [[file, str(count)] for file, count in sorted(files.items())])
    if functions:
        rows = [
            [str(Path(c.co_filename).relative_to(PACKAGE)), c.co_qualname, str(k)] for c, k in walk.functions.items()
        ]
        show("functions", ["file", "function", "entered"], sorted(rows))
    counts = {"files": len(files), "functions": sum(files.values()), "switches": walk.switches}
    console.print(counts)
    finish("reading", {"n": n, "posterior": posterior}, 1, **counts)

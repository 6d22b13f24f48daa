"""Command line of the benchmarks."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import bias as bias_module
from benchmarks import demo as demo_module
from benchmarks import epochs as epochs_module
from benchmarks import feature_kernels as feature_kernels_module
from benchmarks import feature_order as feature_order_module
from benchmarks import feature_step as feature_step_module
from benchmarks import gradient_quality as gradient_quality_module
from benchmarks import laplace_classification as laplace_module
from benchmarks import laplace_pictures as laplace_pictures_module
from benchmarks import laplace_poisson as laplace_poisson_module
from benchmarks import memory as memory_module
from benchmarks import paths as paths_module
from benchmarks import product as product_module
from benchmarks import quadruply as quadruply_module
from benchmarks import quadruply_cost as quadruply_cost_module
from benchmarks import quadruply_digits as quadruply_digits_module
from benchmarks import quality as quality_module
from benchmarks import scaling as scaling_module
from benchmarks import solvers as solvers_module
from benchmarks import step as step_module
from benchmarks import truncation_cost as truncation_cost_module
from benchmarks import truncation_table as table_module
from benchmarks import variance as variance_module
from benchmarks.runner import CONTENDERS, RESULTS, Outcome, environment, run_apart, run_here, save

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
console = Console()

Threads = Annotated[int, typer.Option(help="Threads of every contender.")]
DEFAULT_THREADS = torch.get_num_threads()


def _compare(case: str, names: list[str], **options: Any) -> dict[str, Outcome]:
    """Runs contenders one after the other, each in its own process."""
    outcomes = {}
    for name in names:
        with console.status(f"{case}: {name}"):
            outcomes[name] = run_apart(case, name, **options)
        if "error" in outcomes[name]:
            console.print(f"[red]{name} failed:[/red] {outcomes[name]['error']}")
    return outcomes


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title)
    for index, column in enumerate(columns):
        # Folded where the console is narrow: a figure must not lose its digits.
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _finish(name: str, options: dict[str, Any], threads: int, **content: Any) -> None:
    path = save(name, {"environment": environment(threads), "options": options, **content})
    console.print(f"saved {path}")


@app.command(name="list")
def list_cases() -> None:
    """The cases and their contenders."""
    for case, contenders in CONTENDERS.items():
        console.print(f"[bold]{case}[/bold]: {'; '.join(contenders)}")


@app.command()
def step(
    dataset: str = "elevators",
    split: int = 0,
    rows: Annotated[int | None, typer.Option(help="First training rows only.")] = None,
    steps: int = 10,
    only: Annotated[list[str] | None, typer.Option(help="Contenders, by name; all but Cholesky by default.")] = None,
    gradient_error: Annotated[bool, typer.Option(help="Measure gradients against the exact one.")] = True,
    seeds: Annotated[int, typer.Option(help="Gradients a contender and checkpoint.")] = 2,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds, memory, epochs and gradient error of one training step."""
    names = only or [name for name in step_module.METHODS if "Cholesky" not in name]
    options = {"dataset": dataset, "split": split, "rows": rows}
    outcomes = _compare("step", names, threads=threads, steps=steps, rate=0.1, **options)
    errors: dict[str, list[float]] = {}
    if gradient_error:
        checkpoints = next(o["checkpoints"] for o in outcomes.values() if "error" not in o)
        exact = _compare("gradients", ["exact"], threads=threads, checkpoints=checkpoints, **options)["exact"]
        found = _compare("gradients", names, threads=threads, checkpoints=checkpoints, seeds=seeds, **options)
        errors = {
            name: step_module.relative_errors(outcome["gradients"], exact["gradients"])
            for name, outcome in found.items()
            if "error" not in outcome
        }
    good = {name: outcome for name, outcome in outcomes.items() if "error" not in outcome}
    _table(
        f"{dataset}, steps 1 to {steps}, {threads} threads",
        ["contender", "s / step", "median", "first", "MB", "epochs / step", "gradient errors at steps 0, 5, 10"],
        [
            [
                name,
                f"{o['seconds_mean']:.2f}",
                f"{o['seconds_median']:.2f}",
                f"{o['seconds_first']:.2f}",
                f"{o['peak_memory_mb']:.0f}",
                f"{sum(o['epochs'][1:]) / steps:.1f}" if o["epochs"] else "",
                " ".join(f"{error:.3f}" for error in errors.get(name, [])),
            ]
            for name, o in good.items()
        ],
    )
    _finish(f"step_{dataset}", options | {"steps": steps}, threads, outcomes=outcomes, gradient_errors=errors)


@app.command()
def product(n: int = 15_000, d: int = 26, s: int = 65, repeats: int = 5, threads: Threads = DEFAULT_THREADS) -> None:
    """The kernel product alone, beside its bound and KeOps."""
    options = {"n": n, "d": d, "s": s, "repeats": repeats}
    outcomes = _compare("product", list(CONTENDERS["product"]), threads=threads, **options)
    floor = outcomes["bound: GEMMs alone"]["best"]
    _table(
        f"n = {n}, d = {d}, {s} right-hand sides, float32, {threads} threads",
        ["contender", "s", "bound / s", "MB"],
        [
            [name, f"{o['best']:.3f}", f"{floor / o['best']:.2f}", f"{o['peak_memory_mb']:.0f}"]
            for name, o in outcomes.items()
            if "error" not in o
        ],
    )
    _finish("product", options, threads, outcomes=outcomes)


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
    dataset: str = "elevators",
    rows: Annotated[int | None, typer.Option(help="First training rows only.")] = None,
    steps: int = 5,
    threads: Annotated[int, typer.Option(help="Threads of all processes together.")] = DEFAULT_THREADS,
) -> None:
    """Products and a training step that several processes share, and the bytes that each contributes to sums."""
    options = {"n": n, "d": d, "s": s, "repeats": repeats, "dataset": dataset, "rows": rows, "steps": steps}
    with_threads = options | {"threads": 1, "threads_together": threads}
    counts = [*(processes or []), *(more or [])] or [1, 2]
    outcomes = {
        str(count): _compare("scaling", ["shared tiles"], processes=count, **with_threads)["shared tiles"]
        for count in counts
    }
    good = {count: outcome for count, outcome in outcomes.items() if "error" not in outcome}
    for name in scaling_module.MEASURED if good else []:
        first = next(iter(good.values()))[name]["best"]
        _table(
            f"{name}: {scaling_module.size_of(name, options)}, float32, {threads} threads together",
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
    _finish("scaling", options | {"processes": counts}, threads, outcomes=outcomes)


@app.command()
def epochs(
    dataset: str = "pol",
    rows: int = 6000,
    steps: int = 30,
    block_size: int = 512,
    max_epochs: int = 1000,
    only: Annotated[list[str] | None, typer.Option(help="Contenders, by name, beside 'standard, cold'.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Epochs of alternating projections: pathwise or standard probes, warm or cold."""
    options = {"dataset": dataset, "rows": rows, "steps": steps, "block_size": block_size, "max_epochs": max_epochs}
    names = [name for name in CONTENDERS["epochs"] if name == "standard, cold" or only is None or name in only]
    outcomes = _compare("epochs", names, threads=threads, **options)
    reference = outcomes["standard, cold"]["total"]
    _table(
        f"{dataset}, {rows} rows, {steps} steps, blocks of {block_size}",
        ["probes, start", "epochs", "fewer by"],
        [[name, f"{o['total']:.0f}", f"{reference / o['total']:.1f}"] for name, o in outcomes.items()],
    )
    _finish(f"epochs_{dataset}", options, threads, outcomes=outcomes)


@app.command()
def solvers(
    rows: int = 3000,
    tolerance: float = 0.01,
    max_epochs: float = 300,
    block_size: int = 250,
    only: Annotated[list[str] | None, typer.Option(help="Solvers, by name; all by default.")] = None,
) -> None:
    """Epochs to tolerance of every solver and preconditioner, on three kernel systems; some minutes."""
    options = {"rows": rows, "tolerance": tolerance, "max_epochs": max_epochs, "block_size": block_size}
    outcomes: dict[str, dict[str, Outcome]] = {}
    for name in only or solvers_module.NAMES:
        outcomes[name] = {on: solvers_module.epochs(on=on, solver=name, **options) for on in solvers_module.SYSTEMS}
        console.print(name, *map(solvers_module.shown, outcomes[name].values()), sep=" | ")
    _table(
        f"{rows} rows, 16 columns to {tolerance:g}, blocks of {block_size}; epochs + overhead",
        ["solver", *solvers_module.SYSTEMS],
        [[name, *map(solvers_module.shown, found.values())] for name, found in outcomes.items()],
    )
    _finish("solvers", options, torch.get_num_threads(), outcomes=outcomes)


@app.command()
def quality(
    dataset: str = "elevators",
    splits: int = 1,
    rows: int | None = None,
    steps: int = 100,
    rate: float = 0.1,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """RMSE and log-likelihood after training, split by split."""
    outcomes = {}
    for split in range(splits):
        options = {"dataset": dataset, "split": split, "rows": rows, "steps": steps, "rate": rate}
        outcomes[split] = _compare("quality", ["ours"], threads=threads, **options)["ours"]
    _table(
        f"{dataset}, {steps} steps",
        ["split", "RMSE", "log-likelihood", "s training", "s prediction", "variance error"],
        [
            [
                str(split),
                f"{o['rmse']:.4f}",
                f"{o['log_likelihood']:.4f}",
                f"{o['seconds_training']:.0f}",
                f"{o['seconds_prediction']:.0f}",
                f"{o['variance_error']:.3f}",
            ]
            for split, o in outcomes.items()
        ],
    )
    _finish(f"quality_{dataset}", {"steps": steps, "rate": rate, "rows": rows}, threads, outcomes=outcomes)


@app.command()
def memory(n: int = 200_000, d: int = 8, columns: int = 17, threads: Threads = DEFAULT_THREADS) -> None:
    """Peak memory of one product and one solver step with the tile cache off."""
    options = {"n": n, "d": d, "columns": columns}
    outcome = _compare("memory", ["ours"], threads=threads, **options)["ours"]
    console.print(outcome)
    _finish("memory", options, threads, outcome=outcome)


@app.command(name="gradient-quality")
def gradient_quality(rows: int = 1500, num_probes: int = 64, repeats: int = 40, seed: int = 0) -> None:
    """The gradient's error by probe distribution, at every setting; about half an hour."""
    gradient_quality_module.run(rows=rows, num_probes=num_probes, repeats=repeats, seed=seed, console=console)


@app.command()
def variance(rows: int = 1500, num_points: int = 500, steps: int = 60) -> None:
    """The posterior variance's error against the exact one."""
    frame = variance_module.variance_error_table(rows=rows, num_points=num_points, steps=steps)
    console.print(frame.to_string())
    _finish("variance", {"rows": rows, "steps": steps}, torch.get_num_threads(), table=frame.to_dict("records"))


@app.command()
def bias(
    dataset: str = "pol",
    rows: Annotated[int, typer.Option(help="First rows of the data.")] = 1000,
    draws: Annotated[int, typer.Option(help="Independent estimates of each contender.")] = 200,
    pictures: Annotated[Path | None, typer.Option(help="Folder for the two pictures of the documentation.")] = None,
) -> None:
    """Bias of value and gradient: truncated CG, Russian roulette, random features, single sample."""
    path = bias_module.run(dataset=dataset, rows=rows, draws=draws, pictures=pictures, console=console)
    console.print(f"saved {path}")


@app.command(name="truncation-cost")
def truncation_cost(
    dataset: str = "pol", rows: int | None = 4000, repeats: int = 20, threads: Threads = DEFAULT_THREADS
) -> None:
    """Seconds of a step: Russian roulette beside truncated CG, with the expected length of its run."""
    options = {"dataset": dataset, "rows": rows, "repeats": repeats}
    outcome = _compare("truncation-cost", ["all"], threads=threads, **options)["all"]
    if "error" in outcome:
        raise typer.Exit(1)
    reference = outcome["CG, 100 steps"]
    _table(
        f"{dataset}, {rows or 'all'} rows, {repeats} steps each, rate 0.05, 80 steps at the least",
        ["truncations", "s / step", "over CG", "its run's length / 100", "expected length / 100"],
        [
            [
                name,
                f"{o['seconds']:.3f}",
                f"{o['seconds'] / reference['seconds']:.2f}",
                f"{o['length'] / 100:.2f}",
                f"{o['expected_length'] / 100:.2f}",
            ]
            for name, o in outcome.items()
            if name != "peak_memory_mb"
        ],
    )
    _finish(f"truncation_cost_{dataset}", options, threads, outcome=outcome)


@app.command()
def laplace(
    dataset: Annotated[str, typer.Option(help="mixture or mnist.")] = "mixture",
    rows: Annotated[int, typer.Option(help="Training points; MNIST has 8,000 at the most.")] = 10_000,
    seconds: Annotated[float, typer.Option(help="Wall-clock budget of each contender, learning included.")] = 200.0,
    max_rank: Annotated[int, typer.Option(help="Actions that are kept.")] = 100,
    only: Annotated[list[str] | None, typer.Option(help="Contenders, by name; goes on with saved ones.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for the picture over time.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Classification at equal time: Laplace, as published, SVGP, subset of data. Goes on where it was interrupted."""
    if dataset not in ("mixture", "mnist"):
        raise typer.BadParameter(f"dataset must be mixture or mnist, got {dataset!r}.")
    options = {"dataset": dataset, "rows": rows, "seconds": seconds, "max_rank": max_rank}
    name = f"laplace_{dataset}"
    outcomes = laplace_module.saved_outcomes(name, options)
    for contestant in only or list(CONTENDERS[laplace_module.CASE]):
        if contestant not in outcomes:
            found = _compare(laplace_module.CASE, [contestant], threads=threads, **options)[contestant]
            if "error" not in found:
                outcomes[contestant] = found
                _finish(name, options, threads, outcomes=outcomes)
    _table(
        f"{dataset}, {rows} training points, {seconds:.0f} s each, {threads} threads",
        ["contender", "prediction", "accuracy", "NLL", "ECE", "products", "s", "MB"],
        laplace_module.summary(outcomes),
    )
    if pictures is not None:
        laplace_pictures_module.over_time(outcomes, pictures / f"laplace_{dataset}.svg")


@app.command(name="laplace-poisson")
def laplace_poisson(draws: int = 10) -> None:
    """Kernel products to the mode of Poisson counts, the published algorithm beside ours; about a minute."""
    outcomes = laplace_poisson_module.table(draws)
    _table(
        f"{draws} draws; products to a relative gradient of .001, where both reach it",
        ["schedule", "published reaches", "ours reaches", "published", "ours", "ratio", "worst ratio"],
        laplace_poisson_module.summary(outcomes),
    )
    _finish("laplace_poisson", {"draws": draws}, torch.get_num_threads(), outcomes=outcomes)


@app.command(name="laplace-pictures")
def laplace_pictures(folder: Path = Path("docs/pictures")) -> None:
    """The pictures of the documentation's page on Laplace's method."""
    for path in laplace_pictures_module.run(folder):
        console.print(f"saved {path}")


@app.command(name="truncation-table")
def truncation_table(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; all six by default.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="rr-cg, cg, cholesky; all by default.")] = None,
    rows: Annotated[int | None, typer.Option(help="First training rows only.")] = None,
    steps: Annotated[int | None, typer.Option(help="Adam steps; the paper's 1500 or 800 by default.")] = None,
    rate: Annotated[float, typer.Option(help="Learning rate, a tenth of it from 50, 70 and 90 % on.")] = 0.01,
    splits: Annotated[int, typer.Option(help="Random splits, by seed; the paper has three.")] = 3,
    cholesky_rows: Annotated[int, typer.Option(help="No Cholesky beyond.")] = table_module.CHOLESKY_ROWS,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """RMSE and NLL by the protocol of Potapczynski et al. 2021, beside theirs. Goes on where it was interrupted."""
    for option, given, known in (
        ("dataset", dataset, table_module.PUBLISHED),
        ("method", method, table_module.METHODS),
    ):
        if unknown := set(given or ()) - set(known):
            raise typer.BadParameter(f"{option} must be one of {', '.join(known)}, got {', '.join(sorted(unknown))}.")
    progress = table_module.Progress()
    shown = []
    for name in dataset or list(table_module.PUBLISHED):
        for kind in method or list(table_module.METHODS):
            for seed in range(splits):
                options = {
                    "dataset": name,
                    "seed": seed,
                    "rows": rows,
                    "steps": steps or table_module.STEPS[name],
                    "rate": rate,
                }
                key = progress.key(kind, options)
                if kind == "cholesky" and table_module.training_rows(name, rows) > cholesky_rows:
                    continue
                if key not in progress.runs:
                    outcome = _compare("truncation-table", [kind], threads=threads, **options)[kind]
                    if "error" in outcome:
                        continue
                    progress.record(key, outcome, environment(threads))
                done = progress.runs[key]
                published = table_module.PUBLISHED[name].get(kind)
                shown.append(
                    [
                        name,
                        str(done["train_rows"]),
                        str(options["steps"]),
                        str(seed),
                        kind,
                        f"{done['rmse']:.3f}",
                        f"{published[0]:.3f}" if published else "",
                        f"{done['nll']:.3f}",
                        f"{published[1]:.3f}" if published else "",
                        f"{done['seconds_training'] / 60:.1f}",
                    ]
                )
    _table(
        f"Adam at {rate}; the published figures are means over three splits, with all rows and steps",
        ["data", "rows", "steps", "split", "method", "RMSE", "published", "NLL", "published", "minutes"],
        shown,
    )


@app.command(name="feature-kernels")
def feature_kernels(
    dataset: Annotated[list[str] | None, typer.Option(help="Data sets; all seven by default.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="natural, 'natural .2', gradient, scgd, minimax, bsgd, 'full batch'.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="linear (m = 128) or fourier (m = 1000), over the network.")] = "linear",
    batch_size: int = 128,
    epochs: int = 100,
    rate: Annotated[float, typer.Option(help="Adam's, falling to 0.")] = 0.01,
    splits: Annotated[int, typer.Option(help="Of the ten 90/10 splits; the publication has five.")] = 5,
    rows: Annotated[int | None, typer.Option(help="First training rows only.")] = None,
    full_steps: Annotated[int, typer.Option(help="Adam steps of the full batch.")] = 300,
    picture: Annotated[Path | None, typer.Option(help="File for the picture of NLML against epochs.")] = None,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """NLML and RMSE by the protocol of Shoham and Avron, beside theirs. Goes on where it was interrupted."""
    progress = feature_kernels_module.progress()
    shown, curves = [], {}
    for name in dataset or list(feature_kernels_module.PUBLISHED):
        for kind in method or list(CONTENDERS["feature-kernels"]):
            outcomes = []
            for split in range(splits):
                options = {
                    "dataset": name,
                    "split": split,
                    "rows": rows,
                    "kernel": kernel,
                    "rate": rate,
                    **({"steps": full_steps} if kind == "full batch" else {"batch_size": batch_size, "epochs": epochs}),
                }
                key = progress.key(kind, options)
                if key not in progress.runs:
                    outcome = _compare("feature-kernels", [kind], threads=threads, **options)[kind]
                    if "error" in outcome:
                        continue
                    progress.record(key, outcome, environment(threads))
                outcomes.append(progress.runs[key])
            if outcomes:
                shown.append(feature_kernels_module.row(name, kind, kernel, batch_size, outcomes))
                curves.setdefault(name, {})[kind] = outcomes[0]
    _table(
        f"network, {kernel} kernel; b = {batch_size}, {epochs} epochs, Adam at {rate}; published: five splits, 100 epochs",
        feature_kernels_module.HEADER,
        shown,
    )
    if picture is not None:
        feature_kernels_module.draw_curves(curves, picture)
        console.print(f"drew {picture}")


@app.command(name="feature-order")
def feature_order(
    epochs: int = 100,
    rates: Annotated[list[float] | None, typer.Option(help="Adam's; .05 and .01 by default.")] = None,
    seeds: int = 2,
) -> None:
    """Excess NLML over the exact optimum with few hyperparameters: kin40k, 500 rows, 64 random Fourier features."""
    table = feature_order_module.order_table(epochs=epochs, rates=rates or [0.05, 0.01], seeds=seeds)
    _table(
        "excess NLML per datum",
        ["method", "rate", "mean", "each"],
        [
            [o["method"], str(o["rate"]), f"{sum(o['excess']) / seeds:.1e}", " ".join(f"{e:.1e}" for e in o["excess"])]
            for o in table
        ],
    )
    _finish("feature_order", {"epochs": epochs, "seeds": seeds}, torch.get_num_threads(), table=table)


@app.command(name="feature-step")
def feature_step(
    n: Annotated[list[int] | None, typer.Option(help="Rows; 10,000 and 1,000,000 by default.")] = None,
    m: int = 256,
    batch_size: int = 256,
    steps: int = 100,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds and memory of a mini-batch step, which do not depend on the number of rows."""
    options = {"m": m, "batch_size": batch_size, "steps": steps}
    sizes = n or [10_000, 1_000_000]
    names = list(CONTENDERS["feature-step"])
    outcomes = {size: _compare("feature-step", names, threads=threads, n=size, **options) for size in sizes}
    _table(
        f"m = {m}, b = {batch_size}, {threads} threads, float32 data",
        ["method", "n", "ms / step, median", "least", "over the first n", "first call, s", "MB beyond the data"],
        [
            [
                name,
                str(size),
                f"{1e3 * o['seconds']:.1f}",
                f"{1e3 * o['least']:.1f}",
                f"{o['seconds'] / outcomes[sizes[0]][name]['seconds']:.2f}",
                f"{o['seconds_first']:.2f}",
                f"{o['megabytes_beyond']:.0f}",
            ]
            for size, by_name in outcomes.items()
            for name, o in by_name.items()
            if "error" not in o
        ],
    )
    _finish("feature_step", options, threads, outcomes=outcomes)


@app.command()
def quadruply(
    dataset: Annotated[list[str] | None, typer.Option(help="kin40k, protein, keggdirected; all by default.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="nystrom, rff, svgp; nystrom and svgp by default.")] = None,
    splits: int = 1,
    features: Annotated[int | None, typer.Option(help="Features m, or centres; by method if not given.")] = None,
    feature_samples: Annotated[int | None, typer.Option(help="Features of an index set.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of a step.")] = None,
    points: Annotated[int | None, typer.Option(help="Control points.")] = None,
    dense_columns: int | None = None,
    tail_features: Annotated[int | None, typer.Option(help="Random features of what a head leaves.")] = None,
    hyper_rate: Annotated[float | None, typer.Option(help="Learning rate of hyperparameters.")] = None,
    learn_kernel: Annotated[bool, typer.Option(help="Learn the kernel too, not the noise alone.")] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of our method; SVGP has the seconds of nystrom.")] = None,
    minutes: Annotated[float, typer.Option(help="Of each run in this call; another call goes on.")] = 120.0,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """RMSE and NLPD beside SVGP with the same time, and beside the published. Goes on where it was interrupted."""
    progress = table_module.Progress(RESULTS / "quadruply.json")
    shown = []
    for name in dataset or list(quadruply_module.PUBLISHED):
        for split in range(splits):
            seconds = None
            for kind in method or ["nystrom", "svgp"]:
                given = {} if kind == "svgp" else {"features": features, "steps": steps, "rows": rows}
                given |= {"feature_samples": feature_samples, "points": points, "dense_columns": dense_columns}
                given |= {"tail_features": tail_features, "hyper_rate": hyper_rate, "learn_kernel": learn_kernel}
                options = quadruply_module.method_options(kind, **given) | {"dataset": name, "split": split}
                if kind == "svgp" and seconds is None:
                    console.print(f"[yellow]{name}: no time to give to SVGP; run nystrom in the same call.[/yellow]")
                    continue
                options["seconds"] = seconds if kind == "svgp" else None
                key = progress.key(kind, options)
                if not progress.runs.get(key, {}).get("finished"):
                    run = {"key": key, "minutes": minutes, **options}
                    outcome = _compare("quadruply", [kind], threads=threads, **run)[kind]
                    if "error" in outcome:
                        continue
                    progress.record(key, outcome, environment(threads))
                done = progress.runs[key]
                if kind != "svgp" and done["finished"] and seconds is None:
                    seconds = round(done["seconds"])
                published = quadruply_module.PUBLISHED[name].get(kind)
                shown.append(
                    [
                        name,
                        str(split),
                        kind,
                        f"{done['steps']}" + ("" if done["finished"] else ", unfinished"),
                        f"{done['rmse']:.3f}",
                        f"{done['rmse'] * done['target_scale']:.3f}",
                        f"{published[0]:.3f}" if published else "",
                        f"{done['nll']:.3f}",
                        f"{published[1]:.3f}" if published else "",
                        f"{done['seconds'] / 60:.1f}",
                    ]
                )
    _table(
        "RMSE in standardised and in raw units; the published RMSE is of five splits, in raw units",
        ["data", "split", "method", "steps", "RMSE", "raw", "published", "NLPD", "published", "minutes"],
        shown,
    )


@app.command(name="quadruply-cost")
def quadruply_cost(
    steps: int = 15,
    feature_samples: int = 4000,
    rows: int = 500,
    points: int = 500,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Seconds of a quadruply stochastic step against the number of data and of features."""
    options = {"steps": steps, "feature_samples": feature_samples, "rows": rows, "points": points}
    outcomes = {}
    for n, m in ((10_000, 100_000), (1_000_000, 100_000), (10_000, 1_000_000), (1_000_000, 1_000_000)):
        outcome = _compare("quadruply-cost", ["step"], threads=threads, num_data=n, num_features=m, **options)["step"]
        if "error" not in outcome:
            outcomes[f"n={n} m={m}"] = outcome
    _table(
        f"{feature_samples} sampled features, {rows} rows, {points} control points",
        ["problem", "s / step", "first", "MB beyond the second step"],
        [
            [name, f"{o['seconds']:.4f}", f"{o['seconds_first']:.2f}", f"{o['memory_growth_mb']:.0f}"]
            for name, o in outcomes.items()
        ],
    )
    _finish("quadruply_cost", options, threads, outcomes=outcomes)


@app.command(name="quadruply-variance")
def quadruply_variance(
    dataset: str = "kin40k",
    features: int = 10_000,
    samples: int = 500,
    rows: int = 500,
    draws: int = 300,
    lengthscale: float = 2.5,
    points: Annotated[list[int] | None, typer.Option(help="Support points; 50, 100, 200, 400 by default.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for the picture of the documentation.")] = None,
) -> None:
    """What control variates do to the noise of value and gradient."""
    counts = points or [50, 100, 200, 400]
    options = {"dataset": dataset, "num_features": features, "samples": samples, "rows": rows, "draws": draws}
    options |= {"points": counts, "lengthscale": lengthscale}
    table = quadruply_cost_module.control_variances(**options)
    _table(
        f"{dataset}, {features} features, {samples} sampled, {draws} draws",
        ["data term", "points", "mean", "sd of the value", "gradient variance"],
        [
            [
                row["estimator"],
                str(row["points"]),
                f"{row['mean']:.4g}",
                f"{row['value_sd']:.3g}",
                f"{row['gradient_variance']:.3g}",
            ]
            for row in table
        ],
    )
    if pictures is not None:
        console.print(f"drew {quadruply_cost_module.draw_variances(table, pictures)}")
    _finish("quadruply_variance", options, torch.get_num_threads(), table=table)


@app.command(name="quadruply-digits")
def quadruply_digits(
    basis: Annotated[str, typer.Option(help="rff or nystrom.")] = "nystrom",
    features: int = 3000,
    feature_samples: int = 2000,
    rows: int = 500,
    steps: int = 700,
    outputscale: float = 10.0,
    shrink: Annotated[float, typer.Option(help="Lengthscale over the median distance.")] = 0.5,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Odd or even digits: logistic site bound beside a machine with the exact kernel."""
    options = {"basis": basis, "features": features, "feature_samples": feature_samples, "rows": rows}
    options |= {"steps": steps, "outputscale": outputscale, "shrink": shrink}
    outcomes = _compare("quadruply-digits", ["ours", "exact kernel"], threads=threads, **options)
    console.print(outcomes)
    _finish(f"quadruply_digits_{basis}", options, threads, outcomes=outcomes)


@app.command()
def demo(
    steps: int = 5, out: Path = Path("out"), svgp: Annotated[bool, typer.Option(help="Train the rival too.")] = True
) -> None:
    """Hourly weather of three airports: train, predict, compare, plot."""
    demo_module.run(steps=steps, out=out, with_svgp=svgp, console=console)


app.command()(paths_module.paths)


@app.command(hidden=True)
def contender(case: str, name: str, options: str, output: Path) -> None:
    """The inside of one contender's process."""
    run_here(case, name, json.loads(options), output)


__all__ = [
    "app",
    "epochs_module",
    "feature_step_module",
    "memory_module",
    "product_module",
    "quadruply_digits_module",
    "quality_module",
    "truncation_cost_module",
]

if __name__ == "__main__":
    app()

"""A third of a million flights on a small machine: an exact Gaussian process on a budget, beside inducing points.

Hyperparameters start at averages over fits to neighbourhoods. A step of training may take a few passes over the kernel
matrix, which is never stored; its solves go on where the last step's ended, and everything that the next one needs is
saved after each, so that an interrupted run goes on exactly. The rival has the same kernel and the same wall-clock time.
"""

import resource
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import gpytorch
import torch
import typer
from gpytorch.distributions import MultivariateNormal
from rich.console import Console
from rich.table import Table
from scipy.cluster.vq import kmeans2
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.datasets import Split, load_flights
from benchmarks.laplace_classification import saved_outcomes
from benchmarks.models import MaternRegression
from benchmarks.quality import scores
from benchmarks.runner import Outcome, contender, environment, run_apart, save
from gpy_iterative.errors import ConvergenceWarning
from gpy_iterative.linear_operators import KernelProducts

CASE = "flights"
#: The mean's solve may take so many times the budget of a training step: it has one column only.
PREDICTION_BUDGETS = 2
#: Of the rival: points from which inducing points are found by k-means, rows of a batch, and test rows at a time.
CLUSTERED_ROWS, BATCH_SIZE, CHUNK = 20_000, 1024, 4096
#: The share of the training rows that the rival's rates are compared on, and of its time that each rate gets for it.
VALIDATION_SHARE, SEARCH_SHARE = 0.1, 0.1
#: Options that saved steps do not depend on.
NOT_OF_TRAINING = ("steps", "rank")
#: The rival's rate is a tenth of itself from this share of its time on.
SLOWER_FROM = 0.8


@dataclass
class Training:
    """A run: what is trained, by what, and what it has measured so far.

    Attributes:
        steps: one record a finished step, the start's first.
        seconds: wall-clock time of all of them.
    """

    mll: gpi.mlls.HutchinsonMarginalLogLikelihood
    optimizer: torch.optim.Optimizer
    steps: list[dict[str, Any]]
    seconds: float = 0.0

    def save(self, path: Path, options: dict[str, Any]) -> None:
        """Everything that the next step needs. Whatever happens in the middle of it leaves the last file whole."""
        content = {
            "options": options,
            "steps": self.steps,
            "seconds": self.seconds,
            "model": self.mll.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "training": self.mll.training_state(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path, options: dict[str, Any]) -> None:
        """Goes on where a run with the same options was interrupted; does nothing where there is none.

        Raises ValueError for the file of a run with others, which may have taken hours. More steps than it was to have
        are no other run.
        """
        if not path.exists():
            return
        content = torch.load(path, weights_only=True)
        different = [
            name for name in options if name not in NOT_OF_TRAINING and options[name] != content["options"].get(name)
        ]
        if different:
            raise ValueError(
                f"{path} is of a run with another {', '.join(different)}: remove it, or name another folder."
            )
        self.mll.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.mll.load_training_state(content["training"])
        self.steps, self.seconds = content["steps"], content["seconds"]

    def record(self, start: float, **figures: Any) -> None:
        """Of what began at `start`."""
        seconds = time.perf_counter() - start
        self.seconds += seconds
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self.steps.append({"seconds": seconds, "peak_memory_mb": peak, **figures})


@contender(CASE, "ours")
def ours(*, folder: str, **options: Any) -> Outcome:
    """Start, training and predictions; each step is saved in the folder, and printed there in ours.log."""
    data = load_flights(rows=options["rows"])
    training = train(data, Path(folder) / "ours.pt", options)
    start = time.perf_counter()
    posterior = training.mll.posterior(
        solver=replace(solver_of(options), max_epochs=PREDICTION_BUDGETS * options["max_epochs"]), rank=options["rank"]
    )
    with torch.no_grad():
        prediction = training.mll.likelihood(posterior(data.test_x))
        rmse, log_likelihood = scores(prediction.mean, prediction.variance, data.test_y)
    solves = posterior.solves
    predicted = time.perf_counter() - start
    return {
        "rmse": rmse,
        "log_likelihood": log_likelihood,
        "seconds": training.seconds + predicted,
        "seconds_prediction": predicted,
        "prediction": {"status": solves.status.name, "epochs": solves.stats.epochs}
        | {"residual_targets": solves.stats.residual_norms["targets"]},
        "target_scale": data.target_scale,
        "training_rows": len(data.train_y),
        "steps": training.steps,
    }


def solver_of(options: dict[str, Any]) -> gpi.solvers.AlternatingProjections:
    """The solver of training steps.

    With few epochs to spend, projections get furthest however large the matrix; conjugate gradients would need a
    preconditioner whose rank grows with it, and have no epochs left to finish in.
    """
    return gpi.solvers.AlternatingProjections(
        max_epochs=options["max_epochs"], block_size=options["block_size"], finish=None
    )


def train(data: Split, path: Path, options: dict[str, Any]) -> Training:
    """The start and all steps, or those that are missing in the file."""
    model = MaternRegression(data)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        model.likelihood,
        model,
        num_probes=options["num_probes"],
        solver=solver_of(options),
        # Nothing is kept between products: four gigabytes would hold a fortieth of the tiles.
        products=KernelProducts(cache_memory=0, compile=options["compiled"]),
        generator=0,
    )
    training = Training(mll, torch.optim.Adam(model.parameters(), lr=options["rate"]), [])
    training.load(path, options)
    log = path.with_suffix(".log")
    if not training.steps:
        start = time.perf_counter()
        gpi.initialize_from_subsets(
            model,
            model.likelihood,
            subset_size=options["subset_size"],
            num_subsets=options["num_subsets"],
            optimizer_steps=options["subset_steps"],
        )
        training.record(start)
        training.save(path, options)
        log.write_text(f"start: {training.seconds:.0f} s\n")
    with warnings.catch_warnings():
        # Solves that end with their budget are what this is about; every step's record says how they ended.
        warnings.simplefilter("ignore", ConvergenceWarning)
        while len(training.steps) <= options["steps"]:
            start = time.perf_counter()
            training.optimizer.zero_grad()
            loss = -mll(model(data.train_x), data.train_y)
            loss.backward()
            training.optimizer.step()
            assert mll.report is not None
            training.record(start, **figures_of(mll.report))
            training.save(path, options)
            with log.open("a") as file:
                file.write(f"step {len(training.steps) - 1}: {mll.report}\n")
    return training


def figures_of(report: gpi.mlls.MarginalLogLikelihoodReport) -> dict[str, Any]:
    """What a step's report says, as plain numbers."""
    return {
        "status": report.status.name,
        "epochs": report.epochs,
        "residual_targets": report.residual_targets,
        "residual_probes": report.residual_probes,
        "value": float(report.value),
        "value_sem": float(report.value_sem),
    }


class VariationalRegression(gpytorch.models.ApproximateGP):
    """The kernel of `MaternRegression` with inducing points that move."""

    def __init__(self, inducing: Tensor) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, distribution))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=inducing.shape[-1])
        )

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train_variational(
    x: Tensor, y: Tensor, *, num_inducing: int, rate: float, seconds: float
) -> tuple[VariationalRegression, gpytorch.likelihoods.GaussianLikelihood, int]:
    """Adam on mini-batches until the time is over: model, likelihood, and how many batches that were."""
    start, generator = time.perf_counter(), torch.Generator().manual_seed(0)
    part = x[torch.randperm(len(x), generator=generator)[:CLUSTERED_ROWS]]
    centres, _ = kmeans2(part.numpy(), min(num_inducing, len(part)), minit="points", seed=0)
    model, likelihood = VariationalRegression(torch.as_tensor(centres)), gpytorch.likelihoods.GaussianLikelihood()
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=rate)
    batches = 0
    while True:
        for batch in torch.randperm(len(x), generator=generator).split(BATCH_SIZE):
            passed = (time.perf_counter() - start) / seconds
            if passed >= 1:
                return model.eval(), likelihood.eval(), batches
            optimizer.param_groups[0]["lr"] = rate if passed < SLOWER_FROM else rate / 10
            optimizer.zero_grad()
            (-elbo(model(x[batch]), y[batch])).backward()
            optimizer.step()
            batches += 1


@torch.no_grad()
def variational_scores(
    model: VariationalRegression, likelihood: gpytorch.likelihoods.GaussianLikelihood, x: Tensor, y: Tensor
) -> tuple[float, float]:
    """RMSE and log-likelihood, some rows at a time."""
    parts = [likelihood(model(rows)) for rows in x.split(CHUNK)]
    mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
    return scores(mean, variance, y)


@contender(CASE, "SVGP, rates")
def rival_rates(*, rows: int | None, seconds: float, num_inducing: int, rates: Sequence[float]) -> Outcome:
    """The log-likelihood on held-out training rows after a part of the time, rate by rate, and the best of them."""
    data = load_flights(rows=rows)
    held_out = round(VALIDATION_SHARE * len(data.train_y))  # rows are in random order
    found = {}
    for rate in rates:
        model, likelihood, _ = train_variational(
            data.train_x[held_out:],
            data.train_y[held_out:],
            num_inducing=num_inducing,
            rate=rate,
            seconds=SEARCH_SHARE * seconds,
        )
        _, found[rate] = variational_scores(model, likelihood, data.train_x[:held_out], data.train_y[:held_out])
    return {"log_likelihoods": {str(rate): value for rate, value in found.items()}, "best": max(found, key=found.get)}


@contender(CASE, "SVGP")
def rival(*, rows: int | None, seconds: float, num_inducing: int, rate: float) -> Outcome:
    """All training rows, all of the time, at the rate that was best."""
    data = load_flights(rows=rows)
    start = time.perf_counter()
    model, likelihood, batches = train_variational(
        data.train_x, data.train_y, num_inducing=num_inducing, rate=rate, seconds=seconds
    )
    trained = time.perf_counter() - start
    rmse, log_likelihood = variational_scores(model, likelihood, data.test_x, data.test_y)
    return {
        "rmse": rmse,
        "log_likelihood": log_likelihood,
        "seconds": time.perf_counter() - start,
        "seconds_prediction": time.perf_counter() - start - trained,
        "batches": batches,
        "passes": batches * BATCH_SIZE / len(data.train_y),
        "rate": rate,
        "noise": likelihood.noise.item(),
    }


def command(
    rows: Annotated[int | None, typer.Option(help="First training rows only; all 294,612 by default.")] = None,
    steps: Annotated[int, typer.Option(help="Of Adam, after the start.")] = 10,
    max_epochs: Annotated[float, typer.Option(help="Of a step's solve.")] = 5.0,
    block_size: Annotated[int, typer.Option(help="Rows of a projection.")] = 1024,
    num_probes: int = 16,
    rate: float = 0.1,
    subset_size: Annotated[int, typer.Option(help="Rows of a neighbourhood of the start.")] = 3000,
    num_subsets: int = 5,
    subset_steps: int = 50,
    rank: Annotated[int, typer.Option(help="Of the predictive variances.")] = 256,
    compiled: Annotated[bool, typer.Option(help="Compile the tiles' arithmetic; needs a C++ compiler.")] = False,
    num_inducing: Annotated[int, typer.Option(help="Of the rival.")] = 1000,
    rates: Annotated[list[float] | None, typer.Option(help="Of the rival; 0.003, 0.01 and 0.03 by default.")] = None,
    folder: Annotated[Path, typer.Option(help="Where every step is saved.")] = Path("out/flights"),
    threads: Annotated[int, typer.Option(help="Threads of every contender.")] = torch.get_num_threads(),
) -> None:
    """Arrival delays of a third of a million flights, beside SVGP; hours. Goes on where it was interrupted."""
    console = Console()
    options: dict[str, Any] = {
        "rows": rows,
        "steps": steps,
        "max_epochs": max_epochs,
        "block_size": block_size,
        "num_probes": num_probes,
        "rate": rate,
        "subset_size": subset_size,
        "num_subsets": num_subsets,
        "subset_steps": subset_steps,
        "rank": rank,
        "compiled": compiled,
    }
    of_rival = {"num_inducing": num_inducing, "rates": rates or [0.003, 0.01, 0.03]}
    name = "flights" if rows is None else f"flights_{rows}"
    outcomes = saved_outcomes(name, options | of_rival)

    def run(contestant: str, **its_own: Any) -> Outcome:
        if contestant not in outcomes:
            with console.status(f"{CASE}: {contestant}"):
                found = run_apart(CASE, contestant, threads=threads, **its_own)
            if "error" in found:
                console.print(f"[red]{contestant} failed:[/red] {found['error']}")
                raise typer.Exit(1)
            outcomes[contestant] = found
            save(name, {"environment": environment(threads), "options": options | of_rival, "outcomes": outcomes})
        return outcomes[contestant]

    console.print(f"every step of ours is saved in {folder / name}, and printed in its ours.log")
    seconds = run("ours", folder=str(folder / name), **options)["seconds"]
    shared = {"rows": rows, "seconds": seconds, "num_inducing": num_inducing}
    best = run("SVGP, rates", rates=of_rival["rates"], **shared)["best"]
    run("SVGP", rate=best, **shared)
    console.print(table(outcomes))
    console.print(step_table(outcomes["ours"]["steps"]))


def table(outcomes: dict[str, Outcome]) -> Table:
    """What the contenders predict, and what that took."""
    scale, size = outcomes["ours"]["target_scale"], outcomes["ours"]["training_rows"]
    shown = Table(title=f"{size:,} flights; RMSE also in minutes, log-likelihood of standardised delays")
    for column in ("contender", "RMSE", "minutes", "log-likelihood", "s", "of it predictions", "MB"):
        shown.add_column(column, justify="left" if column == "contender" else "right", overflow="fold")
    for name in ("ours", "SVGP"):
        o = outcomes[name]
        shown.add_row(
            name,
            f"{o['rmse']:.4f}",
            f"{o['rmse'] * scale:.2f}",
            f"{o['log_likelihood']:.4f}",
            f"{o['seconds']:.0f}",
            f"{o['seconds_prediction']:.0f}",
            f"{max([o['peak_memory_mb'], *(step['peak_memory_mb'] for step in o.get('steps', ()))]):.0f}",
        )
    return shown


def step_table(steps: list[dict[str, Any]]) -> Table:
    """How every step ended; the start has no report."""
    shown = Table(title="steps")
    for column in ("step", "s", "MB", "status", "epochs", "residual: targets", "probes", "mll", "its error"):
        shown.add_column(column, justify="right", overflow="fold")
    for number, o in enumerate(steps):
        figures = []
        if number:
            figures = [
                o["status"].lower(),
                f"{o['epochs']:.2f}",
                f"{o['residual_targets']:.3f}",
                f"{o['residual_probes']:.3f}",
                f"{o['value']:.4f}",
                f"{o['value_sem']:.1g}",
            ]
        shown.add_row(str(number), f"{o['seconds']:.0f}", f"{o['peak_memory_mb']:.0f}", *figures)
    return shown

"""Training on a budget of epochs, whose every step is saved: what the flights are trained by.

A step may take a few passes over the kernel matrix, which is never stored; its solves go on where the last step's ended,
and everything that the next one needs is saved after each, so that an interrupted run goes on exactly.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import gpy_iterative as gpi
from benchmarks.checkpoints import Checkpoint
from benchmarks.datasets import Split
from benchmarks.devices import peak_process_memory
from benchmarks.models import MaternRegression
from benchmarks.training import take_step
from gpy_iterative.errors import ConvergenceWarning
from gpy_iterative.fitting import FitResult
from gpy_iterative.linear_operators import KernelProducts

#: Options that saved steps do not depend on.
NOT_OF_TRAINING = ("steps", "rank")


@dataclass(frozen=True)
class Options:
    """What ours is trained, and predicts, with; the command's help says what each is. By default the paper preset's."""

    rows: int | None = None
    steps: int = 10
    max_epochs: float = 5.0
    block_size: int = 1024
    num_probes: int = 16
    rate: float = 0.1
    subset_size: int = 3000
    num_subsets: int = 5
    rank: int = 256
    compiled: bool = False


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

    def save(self, checkpoint: Checkpoint, options: Options) -> None:
        """Everything that the next step needs."""
        content = {
            "options": asdict(options),
            "steps": self.steps,
            "seconds": self.seconds,
            "model": self.mll.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "training": self.mll.training_state(),
        }
        checkpoint.save(content)

    def load(self, checkpoint: Checkpoint, options: Options) -> None:
        """Goes on where a run with the same options was interrupted; does nothing where there is none.

        Raises ValueError for the file of a run with others, which may have taken hours. More steps than it was to have
        are no other run.
        """
        content = checkpoint.load()
        if content is None:
            return
        check_options(checkpoint, content["options"], options)
        self.mll.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.mll.load_training_state(content["training"])
        self.steps, self.seconds = content["steps"], content["seconds"]

    def record(self, start: float, **figures: Any) -> None:
        """Of what began at `start`."""
        seconds = time.perf_counter() - start
        self.seconds += seconds
        self.steps.append({"seconds": seconds, "peak_memory_mb": peak_process_memory(), **figures})


def check_options(checkpoint: Checkpoint, found: Mapping[str, Any], options: Options) -> None:
    """Raises ValueError where what was found in the checkpoint is of a training with other options."""
    different = [
        name for name, value in asdict(options).items() if name not in NOT_OF_TRAINING and value != found.get(name)
    ]
    if different:
        raise ValueError(
            f"{checkpoint.path} is of a run with another {', '.join(different)}: remove it, or name another folder."
        )


def solver_of(options: Options) -> gpi.solvers.AlternatingProjections:
    """The solver of training steps.

    With few epochs to spend, projections get furthest however large the matrix; conjugate gradients would need a
    preconditioner whose rank grows with it, and have no epochs left to finish in.
    """
    return gpi.solvers.AlternatingProjections(
        max_epochs=options.max_epochs, block_size=options.block_size, fallback=None
    )


def mll_of(data: Split, options: Options) -> gpi.mlls.HutchinsonMarginalLogLikelihood:
    """The marginal log likelihood of a new model, on the budget."""
    model = MaternRegression(data)
    return gpi.mlls.HutchinsonMarginalLogLikelihood(
        model.likelihood,
        model,
        num_probes=options.num_probes,
        solver=solver_of(options),
        # Nothing is kept between products: four gigabytes would hold a fortieth of the tiles.
        products=KernelProducts(cache_memory=0, compile=options.compiled),
        generator=0,
    )


def start_from_subsets(mll: gpi.mlls.HutchinsonMarginalLogLikelihood, options: Options) -> None:
    """Sets the hyperparameters to what neighbourhoods agree on."""
    gpi.initialize_from_subsets(
        mll.model,
        mll.likelihood,
        subset_size=options.subset_size,
        num_subsets=options.num_subsets,
    )


def fit(
    data: Split, folder: Path, options: Options
) -> tuple[gpi.mlls.HutchinsonMarginalLogLikelihood, float, FitResult]:
    """The same start, and `gpi.fit` with at most so many steps; goes on where a call was interrupted.

    Returns the mll, the seconds of all calls' finished steps and of the start, and the result.
    """
    mll, start = mll_of(data, options), Checkpoint(folder / "start.pt")
    content = start.load()
    if content is None:
        begin = time.perf_counter()
        start_from_subsets(mll, options)
        content = {"options": asdict(options), "model": mll.model.state_dict(), "seconds": time.perf_counter() - begin}
        start.save(content)
    check_options(start, content["options"], options)
    mll.model.load_state_dict(content["model"])
    with (folder / "fit.log").open("a") as log, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        result = gpi.fit(
            mll,
            max_steps=options.steps,
            checkpoint=folder / "fit.pt",
            progress=False,
            callback=lambda row: print(row, file=log, flush=True),
        )
    return mll, content["seconds"] + result.seconds, result


def train(data: Split, checkpoint: Checkpoint, options: Options) -> Training:
    """The start and all steps, or those that are missing in the file."""
    mll = mll_of(data, options)
    model = mll.model
    training = Training(mll, torch.optim.Adam(model.parameters(), lr=options.rate), [])
    training.load(checkpoint, options)
    log = checkpoint.path.with_suffix(".log")
    if not training.steps:
        start = time.perf_counter()
        start_from_subsets(mll, options)
        training.record(start)
        training.save(checkpoint, options)
        log.write_text(f"start: {training.seconds:.0f} s\n")
    with warnings.catch_warnings():
        # Solves that end with their budget are what this is about; every step's record says how they ended.
        warnings.simplefilter("ignore", ConvergenceWarning)
        while len(training.steps) <= options.steps:
            start = time.perf_counter()
            take_step(model, mll, training.optimizer, data)
            assert mll.report is not None
            training.record(start, **figures_of(mll.report))
            training.save(checkpoint, options)
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

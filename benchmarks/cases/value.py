"""The value along a training run against the exact one, in standard errors that the report gives."""

import torch

import gpy_iterative as gpi
from benchmarks.command_line import (
    DEFAULT_THREADS,
    ChosenData,
    ChosenSplit,
    Threads,
    app,
    finish,
    run_contenders,
    show,
    succeeded_or_exit,
)
from benchmarks.datasets import load
from benchmarks.metrics import root_mean_square
from benchmarks.models import MaternRegression
from benchmarks.runner import Outcome, contender
from benchmarks.training import take_step


@contender("value", "ours")
def train(*, dataset: str, split: int, rows: int, steps: int, rate: float, seeds: int) -> Outcome:
    """Values and reported standard errors, a datum, [seed][step]; and the exact values at the same hyperparameters."""
    data, exact_data = (load(dataset, split, rows=rows, dtype=dtype) for dtype in (torch.float32, torch.float64))
    reference = MaternRegression(exact_data)
    exact_mll = gpi.mlls.HutchinsonMarginalLogLikelihood(reference.likelihood, reference, solver=gpi.solvers.Cholesky())
    outcome: Outcome = {"values": [], "standard_errors": [], "exact": []}
    for seed in range(seeds):
        model = MaternRegression(data)
        mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        values, errors, exact = [], [], []
        for _ in range(steps):
            reference.set_flat_parameters(model.flat_parameters().double())
            with torch.no_grad():
                exact.append(exact_mll(reference(exact_data.train_x), exact_data.train_y).item())
            values.append(-take_step(model, mll, optimizer, data))
            errors.append(mll.report.value_sem.item())
        for name, found in (("values", values), ("standard_errors", errors), ("exact", exact)):
            outcome[name].append(found)
    return outcome


@app.command()
def value(
    dataset: ChosenData = "pol",
    split: ChosenSplit = 0,
    rows: int = 6000,
    steps: int = 60,
    rate: float = 0.1,
    seeds: int = 1,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """How far the log marginal likelihood of training steps is from the exact one, beside what its report says."""
    options = {"dataset": dataset, "split": split, "rows": rows, "steps": steps, "rate": rate, "seeds": seeds}
    outcome = succeeded_or_exit(run_contenders("value", ["ours"], threads=threads, **options))["ours"]
    names = ("values", "exact", "standard_errors")
    values, exact, errors = (torch.tensor(outcome[name], dtype=torch.float64) for name in names)
    differences = values - exact
    ratios = differences / errors
    show(
        f"{dataset}, {rows} rows, {steps} steps: nats a datum",
        ["seed", "error, rms", "largest", "reported, rms", "error / reported, rms", "largest"],
        [
            [
                str(seed),
                f"{root_mean_square(differences[seed]):.4f}",
                f"{differences[seed].abs().max():.4f}",
                f"{root_mean_square(errors[seed]):.4f}",
                f"{root_mean_square(ratios[seed]):.2f}",
                f"{ratios[seed].abs().max():.2f}",
            ]
            for seed in range(seeds)
        ],
    )
    finish(f"value_{dataset}", options, threads, outcome=outcome)

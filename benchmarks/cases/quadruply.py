"""Quadruply stochastic training beside SVGP with as much time, on the data of Evans and Nair 2018, table 2."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

import gpytorch
import torch
import typer
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpy_iterative as gpi
from benchmarks import published
from benchmarks.checkpoints import OUT, Checkpoint
from benchmarks.command_line import DEFAULT_MINUTES, DEFAULT_THREADS, Minutes, Threads, app, names_of, run_and_show
from benchmarks.datasets import Split, load, rows_of
from benchmarks.metrics import prediction_scores
from benchmarks.models import SquaredExponentialRegression
from benchmarks.runner import CONTENDERS, RESULTS, Outcome, contender
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table, beside
from benchmarks.variational import VariationalGP, VariationalTraining, random_rows

CHECKPOINTS = OUT / "quadruply"
#: Rows whose exact Gaussian process gives the hyperparameters to start from, and steps of Adam on them.
START_ROWS, START_STEPS = 2000, 100
#: That a run takes at the least, even if the start has taken all of its seconds.
LEAST_STEPS = 3
#: Eigenfeatures of random centres; random Fourier features, the basis of the paper's table; the rival.
METHODS = ("nystrom", "rff", "svgp")


class Training(Protocol):
    """A model in training: steps, checkpoints, predictions."""

    def step(self, fraction: float) -> object:
        """One step of the optimiser; `fraction` of the training is done."""

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""

    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""

    def predict(self, x: Tensor) -> MultivariateNormal:
        """Of targets, noise included."""


class QuadruplyStochastic:
    """Our method on one basis; the noise is learned, the kernel's hyperparameters on request.

    Args:
        data: one split.
        start: model with the hyperparameters of the start.
        basis: "nystrom" (centres are random training rows) or "rff".
        options: of `method_options`.
    """

    def __init__(self, data: Split, start: SquaredExponentialRegression, basis: str, options: dict[str, Any]) -> None:
        self.data = data
        kernel, self.likelihood = start.covar_module.requires_grad_(options["learn_kernel"]), start.likelihood
        if basis == "nystrom":
            generator = torch.Generator().manual_seed(data.train_x.shape[0])
            rows = torch.randperm(len(data.train_x), generator=generator)[: options["features"]]
            made = gpi.models.NystromBasis(kernel, data.train_x[rows], options["tail_features"])
        else:
            made = gpi.models.RandomFourierBasis(kernel, options["features"])
        self.model = gpi.models.QuadruplyStochasticGP(made, num_dense_columns=options["dense_columns"])
        tail = self.model.num_tail_groups * made.group_size
        self.mll = gpi.mlls.QuadruplyStochasticELBO(
            self.likelihood,
            self.model,
            num_feature_samples=min(options["feature_samples"], tail) or None,
            num_data_samples=options["rows"],
            num_control_points=options["points"] if tail else 0,
            generator=0,
        )
        self.optimizer = gpi.models.QuadruplyStochasticOptimizer(
            self.model,
            self.likelihood,
            num_data=len(data.train_y),
            num_steps=options["steps"],
            learning_rate=options.get("weight_rate", 0.1),
            hyper_learning_rate=options["hyper_rate"],
        )

    def step(self, fraction: float) -> None:
        self.optimizer.zero_grad()
        loss = -self.mll(self.model(self.data.train_x), self.data.train_y)
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        run = self.mll.training_state()
        return {"mll": self.mll.state_dict(), "run": run, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.mll.load_state_dict(state["mll"])
        self.mll.load_training_state(state["run"])
        self.optimizer.load_state_dict(state["optimizer"])

    def predict(self, x: Tensor) -> MultivariateNormal:
        return self.likelihood(self.model.posterior(x))


def _variational(data: Split, start: SquaredExponentialRegression, options: dict[str, Any]) -> VariationalTraining:
    """SVGP from the same hyperparameters, all of which it goes on to learn."""
    model = VariationalGP(random_rows(data.train_x, options["features"]), start.mean_module, start.covar_module)
    return VariationalTraining(
        model, start.likelihood, data.train_x, data.train_y, batch_size=options["rows"], rate=options["rate"]
    )


def _start(data: Split, num_rows: int, num_steps: int) -> SquaredExponentialRegression:
    """Hyperparameters of an exact Gaussian process on random training rows."""
    rows = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0))[:num_rows]
    model = SquaredExponentialRegression(data.train_x[rows], data.train_y[rows], ard=True, constant=False)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with gpytorch.settings.max_cholesky_size(num_rows):
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = -mll(model(*model.train_inputs), model.train_targets)
            loss.backward()
            optimizer.step()
    return model


def _make(method: str, data: Split, start: SquaredExponentialRegression, options: dict[str, Any]) -> Training:
    if method == "svgp":
        return _variational(data, start, options)
    return QuadruplyStochastic(data, start, method, options)


def _continue(
    method: str,
    *,
    dataset: str,
    split: int,
    minutes: float,
    steps: int,
    seconds: float | None,
    **options: Any,
) -> Outcome:
    """Trains from the last checkpoint on until `steps` (or `seconds`, the start included), or for so many minutes."""
    data = load(dataset, split)
    told = {"dataset": dataset, "split": split, "steps": steps, "seconds": seconds, **options}
    checkpoint = Checkpoint(
        CHECKPOINTS / ("_".join([method, *(f"{name}={told[name]}" for name in sorted(told))]) + ".pt")
    )
    saved = checkpoint.load()
    begin = time.perf_counter()
    if saved is None:
        start = _start(data, options.get("start_rows", START_ROWS), options.get("start_steps", START_STEPS))
        spent, done = time.perf_counter() - begin, 0
        hyperparameters = start.state_dict()
    else:
        start = SquaredExponentialRegression(data.train_x[:1], data.train_y[:1], ard=True, constant=False)
        hyperparameters = saved["start"]
        start.load_state_dict(hyperparameters)
        spent, done = saved["seconds"], saved["steps"]
    before = time.perf_counter()
    training = _make(method, data, start, options | {"steps": steps})
    if saved is None:
        spent += time.perf_counter() - before
    else:
        training.load(saved["training"])
    earlier, before = spent, time.perf_counter()
    is_done = lambda: done >= steps or (seconds is not None and spent >= seconds and done >= LEAST_STEPS)
    while not is_done() and time.perf_counter() - begin < 60 * minutes:
        training.step(spent / seconds if seconds else done / steps)
        done, spent = done + 1, earlier + time.perf_counter() - before
    finished = is_done()
    if finished:
        checkpoint.remove()
    else:
        state = {"start": hyperparameters, "seconds": spent, "steps": done, "training": training.state()}
        checkpoint.save(state)
    scale = float(rows_of(dataset)[:, -1].std())
    rmse, log_likelihood = prediction_scores(training.predict, data.test_x, data.test_y)
    scores = {"rmse": rmse, "nll": -log_likelihood}
    return {"finished": finished, "steps": done, "seconds": spent, "target_scale": scale, **scores}


for _method in METHODS:
    contender("quadruply", _method)(partial(_continue, _method))


def method_options(method: str, **given: Any) -> dict[str, Any]:
    """What a method's run depends on; `given` overrides where it is not None."""
    defaults: dict[str, dict[str, Any]] = {
        "nystrom": {
            "features": 3000,
            "tail_features": 0,
            "feature_samples": 0,
            "rows": 500,
            "points": 0,
            "steps": 12_000,
            "dense_columns": 0,
            "hyper_rate": 1e-2,
            "learn_kernel": False,
        },
        "rff": {
            "features": 20_000,
            "tail_features": 0,
            "feature_samples": 4000,
            "rows": 500,
            "points": None,
            "steps": 20_000,
            "dense_columns": 0,
            "weight_rate": 0.3,
            "hyper_rate": 1e-2,
            "learn_kernel": False,
        },
        "svgp": {"features": 512, "rows": 1000, "steps": 10**9, "rate": 1e-2},
    }
    own = defaults[method]
    return {name: value if given.get(name) is None else given[name] for name, value in own.items()}


@app.command()
def quadruply(
    dataset: Annotated[
        list[str] | None, names_of(published.QUADRUPLY, "kin40k, protein, keggdirected; all by default.")
    ] = None,
    method: Annotated[
        list[str] | None, names_of(CONTENDERS["quadruply"], "nystrom, rff, svgp; nystrom and svgp by default.")
    ] = None,
    splits: int = 1,
    features: Annotated[int | None, typer.Option(help="Features m, or centres; by method if not given.")] = None,
    feature_samples: Annotated[int | None, typer.Option(help="Features of an index set.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of a step.")] = None,
    points: Annotated[
        int | None, typer.Option(help="Control points, for rows that every step draws anew; else rows are kept.")
    ] = None,
    dense_columns: int | None = None,
    tail_features: Annotated[int | None, typer.Option(help="Random features of what a head leaves.")] = None,
    weight_rate: Annotated[float | None, typer.Option(help="Learning rate of random features' weights.")] = None,
    hyper_rate: Annotated[float | None, typer.Option(help="Learning rate of hyperparameters.")] = None,
    learn_kernel: Annotated[bool, typer.Option(help="Learn the kernel too, not the noise alone.")] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of our method; SVGP has the seconds of nystrom.")] = None,
    minutes: Minutes = DEFAULT_MINUTES,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """RMSE and NLPD beside SVGP with the same time, and beside the published. Goes on where it was interrupted."""
    given = {"features": features, "feature_samples": feature_samples, "rows": rows, "points": points}
    given |= {"dense_columns": dense_columns, "tail_features": tail_features, "steps": steps}
    given |= {"weight_rate": weight_rate, "hyper_rate": hyper_rate, "learn_kernel": learn_kernel}
    runs = [
        planned
        for name in dataset or list(published.QUADRUPLY)
        for split in range(splits)
        for planned in planned_runs(name, split, method or ["nystrom", "svgp"], minutes, **given)
    ]
    run_and_show(RESULTS / "quadruply.json", runs, threads, lambda found: [table(found)])


def planned_runs(
    dataset: str,
    split: int,
    methods: Sequence[str],
    minutes: float,
    start: Mapping[str, int] | None = None,
    **given: Any,
) -> list[Run]:
    """Of one split; SVGP has the time of the method before it, or of nystrom.

    Args:
        dataset, split, methods, minutes: of the runs.
        start: `start_rows` and `start_steps`, of every method, where they are not `START_ROWS` and `START_STEPS`.
        given: of `method_options`.
    """
    data = {"dataset": dataset, "split": split, **(start or {})}
    runs: list[Run] = []
    for method in methods:
        # SVGP has options of its own.
        options = method_options(method, **(given if method != "svgp" else {})) | data
        pace = None
        if method == "svgp":
            pace = runs[0] if runs else planned_runs(dataset, split, ["nystrom"], minutes, start, **given)[0]
        runs.append(Run("quadruply", method, options | {"seconds": None}, pace, {"minutes": minutes}))
    return runs


def table(found: Sequence[Measured]) -> Table:
    """A row a run."""
    rows = []
    for run, done in ((measured.run, measured.outcome) for measured in found):
        name = run.options["dataset"]
        # The paper's inducing points are the nearest to centres.
        theirs = published.QUADRUPLY[name].get("inducing" if run.contender == "nystrom" else run.contender)
        rows.append(
            [
                name,
                str(run.options["split"]),
                run.contender,
                f"{done['steps']}" + ("" if done["finished"] else ", unfinished"),
                f"{done['rmse']:.3f}",
                *beside((done["rmse"] * done["target_scale"], done["nll"]), theirs),
                f"{done['seconds'] / 60:.1f}",
            ]
        )
    return Table(
        "RMSE standardised and in raw units; published: five splits, raw units, for nystrom all rows as inducing points",
        ["data", "split", "method", "steps", "RMSE", "raw", "published", "NLPD", "published", "minutes"],
        rows,
    )


#: Data sets, options, and the start, of the presets.
SIZES: dict[Preset, tuple[list[str], dict[str, int], dict[str, int]]] = {
    Preset.SMOKE: (["kin40k"], {"features": 50, "steps": 5, "rows": 50}, {"start_rows": 200, "start_steps": 10}),
    Preset.QUICK: (["kin40k"], {"features": 1000, "steps": 500}, {}),
    Preset.PAPER: (list(published.QUADRUPLY), {}, {}),
}


def preset_runs(preset: Preset) -> list[Run]:
    """Eigenfeatures, random features in the paper's number, and SVGP with the time of the former."""
    datasets, given, start = SIZES[preset]
    methods = ["nystrom", "svgp"]
    runs = [planned for name in datasets for planned in planned_runs(name, 0, methods, DEFAULT_MINUTES, start, **given)]
    if preset is Preset.PAPER:
        paper = {
            "features": 100_000,
            "feature_samples": 10_000,
            "steps": 100_000,
            "learn_kernel": True,
            "weight_rate": 0.1,
            "hyper_rate": 1e-5,
        }
        runs += [planned for name in datasets for planned in planned_runs(name, 0, ["rff"], DEFAULT_MINUTES, **paper)]
    return runs


register(
    Case(
        "quadruply",
        "Quadruply stochastic training beside SVGP with equal time; tables 2 and 3 of Evans and Nair 2018.",
        preset_runs,
        lambda found: [table(found)],
        note="[Measured](measured.md#millions-of-features) has a larger run.",
        shows_tables=False,
    )
)

"""Quadruply stochastic training beside SVGP with as much time, on the data of Evans and Nair 2018, table 2.

A run is long, so it is cut into pieces: each call goes on from the last checkpoint, for as many minutes as it is given.
"""

import time
from abc import ABC, abstractmethod
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpy_iterative as gpi
from benchmarks.datasets import Split, load, rows_of
from benchmarks.models import SquaredExponentialRegression
from benchmarks.quality import scores
from benchmarks.runner import RESULTS, Outcome, contender

#: Data set -> method -> published RMSE (raw units, five splits) and MNLP (standardised, first split).
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "kin40k": {"rff": (0.174, 0.135), "svgp": (0.247, 0.055)},
    "protein": {"rff": (0.602, 1.34), "svgp": (0.542, 1.06)},
    "keggdirected": {"rff": (0.135, -0.821), "svgp": (0.124, -0.953)},
}
CHECKPOINTS = RESULTS.parent.parent / "out" / "quadruply"
#: Rows whose exact Gaussian process gives the hyperparameters to start from, and steps of Adam on them.
START_ROWS, START_STEPS = 1000, 100
#: Test rows that are predicted at a time.
CHUNK = 4000


class Training(ABC):
    """A model in training: steps, checkpoints, predictions."""

    @abstractmethod
    def step(self, fraction: float) -> None:
        """One step of the optimiser; `fraction` of the training is done."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """For a checkpoint."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""

    @abstractmethod
    def predict(self, x: Tensor) -> MultivariateNormal:
        """Of targets, noise included."""


class QuadruplyStochastic(Training):
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
            num_data_samples=options["rows"],
            num_steps=options["steps"],
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
        return self.likelihood(self.model.predict(x))


class _SVGP(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points: Tensor, start: SquaredExponentialRegression) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing_points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing_points, distribution))
        self.mean_module, self.covar_module = start.mean_module, start.covar_module

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Variational(Training):
    """GPyTorch's SVGP with learned inducing points, from the same hyperparameters, all of which it goes on to learn."""

    def __init__(self, data: Split, start: SquaredExponentialRegression, options: dict[str, Any]) -> None:
        self.data, self.likelihood, self.rows, self.rate = data, start.likelihood, options["rows"], options["rate"]
        self.generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(data.train_x), generator=self.generator)[: options["features"]]
        self.model = _SVGP(data.train_x[rows].clone(), start)
        self.mll = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=len(data.train_y))
        parameters = {id(p): p for p in (*self.model.parameters(), *self.likelihood.parameters())}
        self.optimizer = torch.optim.Adam(list(parameters.values()), lr=self.rate)

    def step(self, fraction: float) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate * 0.1 ** min(1.0, fraction)
        index = torch.randint(len(self.data.train_x), (self.rows,), generator=self.generator)
        self.optimizer.zero_grad()
        loss = -self.mll(self.model(self.data.train_x[index]), self.data.train_y[index])
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "mll": self.mll.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.mll.load_state_dict(state["mll"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])

    def predict(self, x: Tensor) -> MultivariateNormal:
        self.model.eval()
        prediction = self.likelihood(self.model(x))
        self.model.train()
        return prediction


def _start(data: Split) -> SquaredExponentialRegression:
    """Hyperparameters of an exact Gaussian process on random training rows."""
    rows = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0))[:START_ROWS]
    model = SquaredExponentialRegression(data.train_x[rows], data.train_y[rows], ard=True, constant=False)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with gpytorch.settings.max_cholesky_size(START_ROWS):
        for _ in range(START_STEPS):
            optimizer.zero_grad()
            loss = -mll(model(*model.train_inputs), model.train_targets)
            loss.backward()
            optimizer.step()
    return model


def _make(method: str, data: Split, start: SquaredExponentialRegression, options: dict[str, Any]) -> Training:
    return Variational(data, start, options) if method == "svgp" else QuadruplyStochastic(data, start, method, options)


def _continue(
    method: str,
    *,
    key: str,
    dataset: str,
    split: int,
    minutes: float,
    steps: int,
    seconds: float | None,
    **options: Any,
) -> Outcome:
    """Trains from the last checkpoint on until `steps` (or `seconds`, the start included), or for so many minutes."""
    data = load(dataset, split)
    path = CHECKPOINTS / f"{key.replace(' ', '_')}.pt"
    saved = torch.load(path, weights_only=False) if path.exists() else None
    begin = time.perf_counter()
    if saved is None:
        start = _start(data)
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
    while done < steps and (seconds is None or spent < seconds) and time.perf_counter() - begin < 60 * minutes:
        training.step(spent / seconds if seconds else done / steps)
        done, spent = done + 1, earlier + time.perf_counter() - before
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"start": hyperparameters, "seconds": spent, "steps": done, "training": training.state()}, path)
    finished = done >= steps or (seconds is not None and spent >= seconds)
    scale = float(rows_of(dataset)[:, -1].std())
    return {"finished": finished, "steps": done, "seconds": spent, "target_scale": scale, **_scores(training, data)}


@torch.no_grad()
def _scores(training: Training, data: Split) -> dict[str, float]:
    parts = [training.predict(x) for x in data.test_x.split(CHUNK)]
    mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "variance"))
    rmse, log_likelihood = scores(mean, variance, data.test_y)
    return {"rmse": rmse, "nll": -log_likelihood}


@contender("quadruply", "nystrom")
def nystrom(**options: Any) -> Outcome:
    """Eigenfeatures of random centres."""
    return _continue("nystrom", **options)


@contender("quadruply", "rff")
def rff(**options: Any) -> Outcome:
    """Random Fourier features, the basis of the paper's table."""
    return _continue("rff", **options)


@contender("quadruply", "svgp")
def svgp(**options: Any) -> Outcome:
    """The rival."""
    return _continue("svgp", **options)


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
            "points": 500,
            "steps": 20_000,
            "dense_columns": 0,
            "hyper_rate": 1e-2,
            "learn_kernel": False,
        },
        "svgp": {"features": 512, "rows": 1000, "steps": 10**9, "rate": 1e-2},
    }
    own = defaults[method]
    return {name: value if given.get(name) is None else given[name] for name, value in own.items()}

"""Few hyperparameters, where the optimum is known: kin40k, first 500 rows, 64 random Fourier features, batches of 32.

How far the exact likelihood of what each method learned lies above the optimum, which L-BFGS finds on the exact one.
"""

import warnings
from collections.abc import Callable
from typing import Annotated, Any

import gpytorch
import torch
import typer
from gpytorch.mlls import MarginalLogLikelihood

import gpy_iterative as gpi
from benchmarks.cases.feature_step import FourierRegression
from benchmarks.command_line import app, finish, show
from benchmarks.datasets import rows_of
from gpy_iterative.errors import BiasWarning

ROWS, FEATURES, BATCH = 500, 64, 32
#: Share of the run, at its end, over which hyperparameters are averaged.
TAIL = 0.1

_variational = gpi.mlls.VariationalFeatureMarginalLogLikelihood
_compositional = gpi.mlls.CompositionalMarginalLogLikelihood
METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "natural": (_variational, {}),
    "natural, unbiased": (_variational, {"include_batch": False}),
    "gradient": (_variational, {"update": "gradient"}),
    "SCGD": (_compositional, {}),
    "natural, not centred": (_variational, {"centred": False}),
    "gradient, not centred": (_variational, {"update": "gradient", "centred": False}),
    "SCGD, b_t = .9": (_compositional, {"tracker_rate": 0.9}),
    "BSGD": (gpi.mlls.MinibatchMarginalLogLikelihood, {}),
    "minimax, mu = 1": (gpi.mlls.MinimaxMarginalLogLikelihood, {"mu": 1.0}),
    "minimax": (gpi.mlls.MinimaxMarginalLogLikelihood, {}),
}


def small_model() -> FourierRegression:
    """Standardised rows in float64; all hyperparameters start at 1."""
    data = torch.as_tensor(rows_of("kin40k")[:ROWS], dtype=torch.float64)
    data = (data - data.mean(0)) / data.std(0)
    model = FourierRegression(data[:, :-1], data[:, -1], FEATURES)
    model.mean_module = gpytorch.means.ZeroMean()
    model.covar_module.base_kernel.lengthscale = 1.0
    model.covar_module.outputscale = 1.0
    model.likelihood.noise = 1.0
    return model


def exact_nlml(model: FourierRegression) -> float:
    """Per datum."""
    return -float(_variational(model.likelihood, model).exact_value())


def optimum() -> float:
    """The smallest exact NLML per datum, by L-BFGS on GPyTorch's own marginal log likelihood."""
    model = small_model()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = -mll(model(*(model.train_inputs or ())), model.train_targets)
        value.backward()
        return value

    optimizer.step(loss)
    return exact_nlml(model)


def trained(make: Callable[[FourierRegression], MarginalLogLikelihood], *, epochs: int, rate: float) -> float:
    """The exact NLML after Adam with a rate that falls linearly to 0, of hyperparameters averaged over the tail."""
    model = small_model()
    mll = make(model)
    (x,), y = model.train_inputs or (), model.train_targets
    steps = epochs * (ROWS // BATCH)
    optimizer = torch.optim.Adam(mll.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    tail = []
    with gpytorch.settings.debug(False):
        for step in range(steps):
            optimizer.zero_grad()
            (-mll(model(x), y)).backward()
            optimizer.step()
            scheduler.step()
            if step >= (1 - TAIL) * steps:
                tail.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.nn.utils.vector_to_parameters(torch.stack(tail).mean(0), model.parameters())
    return exact_nlml(model)


def order_table(*, epochs: int, rates: list[float], seeds: int) -> list[dict[str, Any]]:
    """For each rate and method, excess NLML per datum for each seed of the batches."""
    best = optimum()
    table = []
    for rate in rates:
        for name, (kind, options) in METHODS.items():
            excess = []
            for seed in range(seeds):
                make = lambda model, kind=kind, options=options, seed=seed: kind(
                    model.likelihood, model, batch_size=BATCH, generator=seed, **options
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", BiasWarning)  # mu = 1 is there to show what it does
                    excess.append(trained(make, epochs=epochs, rate=rate) - best)
            table.append({"method": name, "rate": rate, "excess": excess, "optimum": best})
    return table


@app.command(name="feature-order")
def feature_order(
    epochs: int = 100,
    rates: Annotated[list[float] | None, typer.Option(help="Adam's; .05 and .01 by default.")] = None,
    seeds: int = 2,
) -> None:
    """Excess NLML over the exact optimum with few hyperparameters: kin40k, 500 rows, 64 random Fourier features."""
    table = order_table(epochs=epochs, rates=rates or [0.05, 0.01], seeds=seeds)
    show(
        "excess NLML per datum",
        ["method", "rate", "mean", "each"],
        [
            [o["method"], str(o["rate"]), f"{sum(o['excess']) / seeds:.1e}", " ".join(f"{e:.1e}" for e in o["excess"])]
            for o in table
        ],
    )
    finish("feature_order", {"epochs": epochs, "seeds": seeds}, torch.get_num_threads(), table=table)

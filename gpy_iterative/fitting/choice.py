from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from gpytorch.kernels import InducingPointKernel

from gpy_iterative.checks import check_choice
from gpy_iterative.exact.base import GaussianMarginalLogLikelihood, IterativeMarginalLogLikelihood
from gpy_iterative.exact.validation import checked_system
from gpy_iterative.fitting.coordinates import Coordinates, network_parameters
from gpy_iterative.fitting.steps.directional import directional_product
from gpy_iterative.fitting.steps.quasi_newton import HasExactValues
from gpy_iterative.training.likelihood_params import likelihood_arguments
from gpy_iterative.training.training_system import TrainingSystem, check_has_data, to_training_mode

Method = Literal["auto", "average_information", "quasi_newton", "adam"]

#: More are trained by Adam.
MOST_HYPERPARAMETERS = 60


@dataclass(frozen=True)
class Choice:
    method: Literal["average_information", "quasi_newton", "adam"]
    reason: str


def choose(mll: Any, method: Method, batches: object | None, params: Sequence[Any] = ()) -> Choice:
    check_choice("method", method, get_args(Method))
    if method not in ("auto", "adam") and batches is not None:
        raise ValueError(f"{method!r} takes all data in every step: use batches=None, or method='adam'.")
    if method == "adam":
        return Choice("adam", "method='adam'.")
    is_exact = isinstance(mll, HasExactValues) and mll.has_exact_values()
    if method == "quasi_newton" and not is_exact:
        raise ValueError(
            f"'quasi_newton' needs Laplace's method with LaplaceCholesky, which this {type(mll).__name__} does not have: "
            "use method='auto'."
        )
    obstacle = next(_obstacles(mll, batches, is_exact), None) if method == "auto" else None
    obstacle = obstacle or _missing_information(mll, params)
    if obstacle is not None and method == "auto":
        return Choice("adam", obstacle)
    if obstacle is not None:
        raise ValueError(f"{obstacle} Use method='adam'.")
    if is_exact and method != "average_information":
        return Choice("quasi_newton", "Value and gradient of this model are exact.")
    return Choice("average_information", "The curvature of this model is known.")


def _obstacles(mll: Any, batches: object | None, is_exact: bool) -> Iterator[str]:
    if not isinstance(mll, IterativeMarginalLogLikelihood) and not is_exact:
        yield f"There is no average information of a {type(mll).__name__} with probes or mini-batches."
    if batches is not None:
        yield "Steps with a curvature take all data, and batches= were given."
    network = next(iter(network_parameters(mll)), None)
    if network is not None:
        yield f"{network} belongs to a network."
    size = len(Coordinates(mll))
    if size > MOST_HYPERPARAMETERS:
        yield f"{size} free hyperparameters are more than the {MOST_HYPERPARAMETERS} that a curvature is computed for."


def _missing_information(mll: Any, params: Sequence[Any]) -> str | None:
    if not isinstance(mll, IterativeMarginalLogLikelihood):
        return None
    for name, module in mll.model.named_modules():
        if isinstance(module, InducingPointKernel) and module.inducing_points.requires_grad:
            return f"Average information does not describe the inducing points of {name}, which are trained."
    system = system_now(mll, params)
    try:
        directional_product(system.operator, torch.zeros_like(system.residual))
    except NotImplementedError as error:
        return str(error)
    return None


def system_now(mll: GaussianMarginalLogLikelihood, params: Sequence[Any] = ()) -> TrainingSystem:
    model: Any = mll.model
    check_has_data(model)
    to_training_mode(mll, model, mll.likelihood)
    prior, targets = model(*model.train_inputs), model.train_targets
    arguments = likelihood_arguments(mll, params)
    return checked_system(mll.likelihood, model, prior, targets, arguments, {}, products=mll.products)

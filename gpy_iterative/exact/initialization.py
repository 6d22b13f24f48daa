"""Hyperparameters to start from, where training on all data is expensive: averages over fits to small neighbourhoods.

The start of Lin et al. 2024 ("Improving Linear System Solvers for Hyperparameter Optimisation in Iterative Gaussian
Processes", arXiv 2405.18457, appendix B) for data of hundreds of thousands of rows.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.checks import check_count, check_positive
from gpy_iterative.errors import NonFiniteError
from gpy_iterative.exact.hutchinson import HutchinsonMarginalLogLikelihood
from gpy_iterative.training.progress import Progress, check_progress, reporting
from gpy_iterative.training.run import make_generator
from gpy_iterative.training.training_system import check_inputs

logger = logging.getLogger(__name__)

#: A parameter that moved by less than this share of one step of the optimiser was not identified by its subset.
UNMOVED = 1e-3


def initialize_from_subsets(
    model: ExactGP,
    likelihood: Likelihood,
    subset_size: int = 10_000,
    num_subsets: int = 10,
    generator: torch.Generator | int | None = None,
    *,
    optimizer_steps: int = 100,
    learning_rate: float = 0.1,
    mll_class: Callable[[Likelihood, ExactGP], MarginalLogLikelihood] = HutchinsonMarginalLogLikelihood,
    params: Sequence[Tensor] = (),
    progress: Progress = False,
) -> None:
    """Sets the hyperparameters of model and likelihood, in place, to the average of fits to subsets.

    Each subset is a random training point with its nearest neighbours (Euclidean, standardised inputs); a copy of the
    model is fitted to it by Adam, from the current values. Values are averaged as the user sees them (lengthscale, noise
    variance), not as raw parameters. What a subset does not identify, such as the lengthscale of a column that is constant
    in it, is averaged over the others, and stays as it is where none does. Meant for kernel, mean and noise parameters: an
    average of neural networks is no sensible network.

    Args:
        model: with training data; inputs [n, d], targets [*b, n] or [n, T].
        likelihood: the model's.
        subset_size: rows of a subset; clamped at n. Up to 3,000 each step is exact (n^3), beyond it is iterative.
        num_subsets: how many subsets.
        generator: draws the centres; a generator or the seed of one, None is seed 0.
        optimizer_steps: of Adam.
        learning_rate: of Adam.
        mll_class: made as `(likelihood, model)`; `functools.partial` passes options.
        params: the likelihood's own arguments, tensors with n rows each.
        progress: True shows a bar of subsets; a callable gets every `gpy_iterative.progress.ProgressReport`.

    Raises:
        ValueError: options outside their range, a model without training data or with batches of inputs, inputs that
            are not finite.
        NonFiniteError: a fit ended in a hyperparameter that is not finite. The user's model is as it was, as after
            any other error.

    Cost: num_subsets * optimizer_steps steps of the marginal log likelihood at subset_size rows.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> gpi.initialize_from_subsets(model, likelihood, subset_size=50, num_subsets=2, optimizer_steps=5)
        >>> likelihood.noise.item() < 0.7  # it began at 0.69
        True
    """
    check_count("subset_size", subset_size)
    check_count("num_subsets", num_subsets)
    check_count("optimizer_steps", optimizer_steps)
    check_positive("learning_rate", learning_rate)
    check_progress(progress)
    columns = _standardised_columns(model)
    generator = make_generator(0 if generator is None else generator)
    fits = []
    with reporting(progress, "subsets", "subsets", num_subsets) as tell:
        for done in range(num_subsets):
            rows = _neighbourhood(columns, min(subset_size, columns.shape[0]), generator)
            fitted, loss = _fit(model, likelihood, rows, params, mll_class, optimizer_steps, learning_rate)
            fits.append(fitted)
            logger.info("subset %d of %d, %d data: loss %.4g", done + 1, num_subsets, len(rows), loss)
            tell(done + 1, {"loss": loss})
    with torch.no_grad():
        for name, parameter, constraint in _parameters(model, likelihood):
            average = torch.stack([fitted[name] for fitted in fits]).nanmean(0)
            is_fitted = ~average.isnan()
            average = torch.where(is_fitted, average, _transformed(parameter, constraint))
            raw = average if constraint is None else constraint.inverse_transform(average)
            # An untouched entry keeps its bits.
            parameter.data.copy_(torch.where(is_fitted, raw, parameter))
    model.prediction_strategy = None


def _standardised_columns(model: ExactGP) -> Tensor:
    """All training inputs side by side, [n, d], each column with mean 0 and deviation 1 (or 0)."""
    if not model.train_inputs or model.train_targets is None:
        raise ValueError("The model has no training data: call model.set_train_data(inputs, targets) first.")
    check_inputs(model)
    for inputs in model.train_inputs:
        if inputs.dim() != 2:
            raise ValueError(f"Subsets need training inputs [n, d], got {tuple(inputs.shape)}.")
    columns = torch.cat([inputs.detach().to(model.train_targets.dtype) for inputs in model.train_inputs], dim=-1)
    centred = columns - columns.mean(0)
    deviation = centred.square().mean(0).sqrt()
    return centred / torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _neighbourhood(columns: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Rows [size] of a random point and its nearest neighbours."""
    centre = int(torch.randint(columns.shape[0], (), generator=generator, device=generator.device))
    distances = (columns - columns[centre]).square().sum(-1)
    return distances.topk(size, largest=False).indices.sort().values


def _fit(
    model: ExactGP,
    likelihood: Likelihood,
    rows: Tensor,
    params: Sequence[Tensor],
    mll_class: Callable[[Likelihood, ExactGP], MarginalLogLikelihood],
    steps: int,
    learning_rate: float,
) -> tuple[dict[str, Tensor], float]:
    """Values of a copy after its fit to some rows, NaN where they have not moved, and the last loss."""
    # Together, so that a likelihood shared by both stays shared.
    model, likelihood = copy.deepcopy((model, likelihood))
    model.train()
    likelihood.train()
    _restrict(model, likelihood, rows)
    mll = mll_class(likelihood, model)
    params = [param[rows] for param in params]
    before = {name: parameter.detach().clone() for name, parameter, _ in _parameters(model, likelihood)}
    trained = [parameter for _, parameter, _ in _parameters(model, likelihood) if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets, *params).sum()
        loss.backward()
        optimizer.step()
    values = {}
    for name, parameter, constraint in _parameters(model, likelihood):
        value = _transformed(parameter, constraint)
        if not torch.isfinite(value).all():
            raise NonFiniteError(
                f"The fit to a subset ended with {name} = {value.tolist()}. A smaller learning_rate, or a constraint "
                "on the parameter, keeps it in its domain. The model has not been changed."
            )
        has_moved = (parameter.detach() - before[name]).abs() > UNMOVED * learning_rate
        values[name] = torch.where(has_moved, value, torch.nan)
    return values, loss.item()


def _restrict(model: ExactGP, likelihood: Likelihood, rows: Tensor) -> None:
    """Keeps some rows of the training data, and of a fixed noise."""
    inputs = tuple(x[rows] for x in model.train_inputs)
    targets = model.train_targets
    model.set_train_data(inputs, strict=False)
    with torch.no_grad():  # a model of few rows, which is all that the prior's layout takes
        data_dim = targets.dim() - len(model(*inputs).event_shape)
    model.set_train_data(targets=targets.index_select(data_dim, rows), strict=False)
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        likelihood.noise = likelihood.noise_covar.noise[..., rows]


def _parameters(
    model: ExactGP, likelihood: Likelihood
) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module | None]]:
    """Name, raw parameter and constraint of everything that is trained, each once."""
    seen: set[int] = set()
    for owner, module in (("model", model), ("likelihood", likelihood)):
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{owner}.{name}", parameter, constraint


def _transformed(parameter: Tensor, constraint: torch.nn.Module | None) -> Tensor:
    """The parameter as the user sees it."""
    return (parameter if constraint is None else constraint.transform(parameter)).detach().clone()

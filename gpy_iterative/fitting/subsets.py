"""Initial hyperparameters from subsets, as in Lin et al. 2024 (arXiv 2405.18457, appendix B)."""

import copy
import logging
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood, _GaussianLikelihoodBase
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.exact.base import IterativeMarginalLogLikelihood
from gpy_iterative.exact.hutchinson import HutchinsonMarginalLogLikelihood
from gpy_iterative.fitting.choice import choose
from gpy_iterative.fitting.coordinates import Coordinates
from gpy_iterative.fitting.result import irrelevant_inputs
from gpy_iterative.fitting.steps.average_information import AverageInformation
from gpy_iterative.random_numbers import integers, permutation
from gpy_iterative.training.progress import Progress, check_progress, reporting
from gpy_iterative.training.run import make_generator
from gpy_iterative.training.training_system import check_has_data, check_inputs, to_training_mode
from gpy_iterative.worker_threads import CPU

logger = logging.getLogger(__name__)

LEFT, MAX_STEPS = 0.5, 15
SUBSET_SIZE, LARGE_SUBSET_SIZE, MANY_DATA = 1_000, 3_000, 200_000


def initialize_from_subsets(
    model: ExactGP,
    likelihood: Likelihood,
    subset_size: int | None = None,
    num_subsets: int = 5,
    generator: torch.Generator | int | None = None,
    *,
    progress: Progress = False,
) -> None:
    """Sets the hyperparameters of model and likelihood, in place, to a weighted mean of the optima of subsets.

    Half of each subset is a random training point with its nearest neighbours (Euclidean, standardised inputs), half is
    random rows. Average information fits a copy of the model, from the last optimum. The optima t_k, logarithms of
    positive hyperparameters, are weighted by their information A_k: (sum_k A_k)^-1 sum_k A_k t_k, within their range.
    Lengthscales of inputs that are irrelevant to the subsets go back towards their start, because more data may need them.

    Args:
        model: with training data; inputs [n, d], targets [*b, n] or [n, T].
        subset_size: rows, at most n. None is 1,000, or 3,000 from 200,000 data on. Up to 3,000, steps are exact (n^3), else
            iterative.
        generator: draws the subsets; a generator or a seed, None is seed 0.
        progress: as in `gpy_iterative.fit`.

    Raises:
        ValueError: invalid options, no training data, batches of inputs, non-finite inputs, a non-Gaussian likelihood, a
            model without average information (a network, more than 60 hyperparameters).
        NonFiniteError, NotPositiveDefiniteError: a subset cannot be evaluated. Any error leaves the model unchanged.

    Cost: about 10 steps for the first subset and 3 for each other.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> gpi.initialize_from_subsets(model, likelihood, subset_size=50, num_subsets=2)
        >>> likelihood.noise.item() < 0.7  # it began at 0.69
        True
    """
    check_count("subset_size", subset_size, optional=True)
    check_count("num_subsets", num_subsets)
    check_progress(progress)
    check_subsets(model, likelihood)
    columns, generator = _standardised_columns(model), make_generator(0 if generator is None else generator)
    if subset_size is None:
        subset_size = SUBSET_SIZE if len(columns) < MANY_DATA else LARGE_SUBSET_SIZE
    coordinates = Coordinates(HutchinsonMarginalLogLikelihood(likelihood, model))
    start = optimum = coordinates.read()
    optima, information, seen = [], [], []
    with reporting(progress, "subsets", "subsets", num_subsets) as tell:
        for done in range(num_subsets):
            rows = _near_and_far(columns, min(subset_size, len(columns)), generator)
            subset = _of_rows(model, likelihood, rows, optimum)
            optimiser = _climbed(subset, generator)
            found, value = optimiser.assess(), optimiser.point.per_datum[0]
            optimum = optimiser.point.position
            optima.append(optimum)
            information.append(found.matrix)
            seen.append(found.curvature.matrix)
            logger.info("subset %d of %d, %d data: value %.4g", done + 1, num_subsets, len(rows), value)
            tell(done + 1, {"value": value})
    mean = _combined(torch.stack(optima), torch.stack(information))
    coordinates.write(_noticed(mean, start, torch.stack(seen).sum(0), coordinates))
    model.prediction_strategy = None


def check_subsets(model: Any, likelihood: Any) -> None:
    if not isinstance(model, ExactGP) or not isinstance(likelihood, _GaussianLikelihoodBase):
        raise ValueError(
            "Fitting subsets needs an ExactGP with a Gaussian likelihood, got "
            f"{type(model).__name__} with {type(likelihood).__name__}: train from the current hyperparameters "
            "(start='current')."
        )
    check_has_data(model)
    assert model.train_inputs is not None
    check_inputs(model)
    for inputs in model.train_inputs:
        if inputs.dim() != 2:
            raise ValueError(
                f"Fitting subsets needs training inputs of shape [n, d], got {tuple(inputs.shape)}: train from the current "
                "hyperparameters (start='current')."
            )
    few = torch.arange(min(len(model.train_inputs[0]), 2), device=CPU)
    choice = choose(_of_rows(model, likelihood, few), "auto", None)
    if choice.method != "average_information":
        raise ValueError(
            f"{choice.reason} Fitting subsets needs average information: train from the current hyperparameters "
            "(start='current')."
        )


def _standardised_columns(model: ExactGP) -> Tensor:
    assert model.train_inputs is not None
    assert model.train_targets is not None
    columns = torch.cat([inputs.detach().to(model.train_targets.dtype) for inputs in model.train_inputs], dim=-1)
    centred = columns - columns.mean(0)
    deviation = centred.square().mean(0).sqrt()
    return centred / torch.where(deviation > 0, deviation, torch.ones_like(deviation))


def _near_and_far(columns: Tensor, size: int, generator: torch.Generator) -> Tensor:
    centre = int(integers(columns.shape[0], (), generator))
    order = (columns - columns[centre]).square().sum(-1).argsort()
    near, others = order.split([size - size // 2, len(order) - size + size // 2])
    drawn = permutation(len(others), generator)[: size // 2]
    return torch.cat([near, others[drawn.to(others.device)]]).sort().values


def _of_rows(
    model: ExactGP, likelihood: Likelihood, rows: Tensor, position: Tensor | None = None
) -> IterativeMarginalLogLikelihood:
    # Together: a shared likelihood stays shared.
    model, likelihood = copy.deepcopy((model, likelihood))
    to_training_mode(model, likelihood)
    targets = model.train_targets
    rows = rows.to(targets.device)
    inputs = tuple(x[rows] for x in model.train_inputs)
    model.set_train_data(inputs, strict=False)
    with torch.no_grad():  # for the prior's layout
        data_dim = targets.dim() - len(model(*inputs).event_shape)
    model.set_train_data(targets=targets.index_select(data_dim, rows), strict=False)
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        likelihood.noise = likelihood.noise_covar.noise[..., rows]
    mll = HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
    if position is not None:
        Coordinates(mll).write(position)
    return mll


def _climbed(mll: IterativeMarginalLogLikelihood, generator: torch.Generator) -> AverageInformation:
    """At the optimum."""
    optimiser = AverageInformation(mll, generator=generator)
    for _ in range(MAX_STEPS):
        if optimiser.assess().left < LEFT or optimiser.step() is None:
            break
    return optimiser


def _combined(optima: Tensor, information: Tensor) -> Tensor:
    """The weighted mean [p] of optima [k, p], within their range."""
    weighted = (information @ optima.unsqueeze(-1)).sum(0)
    found = torch.linalg.solve(information.sum(0), weighted).squeeze(-1)
    return found.maximum(optima.amin(0)).minimum(optima.amax(0))


def _noticed(found: Tensor, start: Tensor, information: Tensor, coordinates: Coordinates) -> Tensor:
    """`found` [p] with large lengthscales of irrelevant inputs back towards `start`, where subsets notice them.

    There, the standard error of the logarithm is one. Far out, a lengthscale has no gradient by which more data could move
    it. Information [p, p] falls with the fourth power of a large lengthscale.
    """
    irrelevant = irrelevant_inputs(coordinates, information)
    seen = information.diagonal().clamp_min(torch.finfo(information.dtype).tiny)
    excess = -seen.log() / 4
    excess = torch.where(torch.tensor([name in irrelevant for name in coordinates.names], device=CPU), excess, 0.0)
    return (found - excess).maximum(start).minimum(found)

import copy
from collections.abc import Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.likelihoods.noise_models import FixedGaussianNoise
from gpytorch.models import ExactGP
from linear_operator import LinearOperator
from torch import Tensor
from torch.nn.functional import pad

from gpy_iterative.checks import check_finite, check_same_kind
from gpy_iterative.exact.prediction.blocks import principal_blocks
from gpy_iterative.exact.prediction.joint_prior import checked_inputs, common_batch
from gpy_iterative.linear_operators.extensions import dense_rows
from gpy_iterative.preconditioners.vecchia import block_factors
from gpy_iterative.training.training_system import TrainingSystem, unexpanded


def check_observations(model: ExactGP, parts: Sequence[Any]) -> None:
    if getattr(model, "input_transform", None) is not None:  # BoTorch keeps original and transformed inputs
        raise ValueError(
            "The model's input_transform would transform the new inputs a second time: call posterior.install(), then "
            "model.condition_on_observations(X, Y) with X and Y as they were before any transform."
        )
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(
                f"New inputs, targets and noise must be tensors, got {type(part).__name__}: convert them with "
                "torch.as_tensor(..., dtype=model.train_targets.dtype)."
            )
    check_without_gradients(parts)


def check_without_gradients(parts: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        raise RuntimeError(
            "An iterative posterior has no gradients with respect to new observations: detach them, or use "
            "torch.no_grad() with a learned input_transform. For acquisition functions that need such gradients (knowledge "
            "gradient, integrated variance), model.train(); model.eval() restores GPyTorch's own dense predictions."
        )


def with_observations(
    model: ExactGP,
    likelihood: Likelihood,
    event_dims: int,
    inputs: Sequence[Tensor],
    targets: Tensor,
    noise: Tensor | None,
) -> tuple[ExactGP, Likelihood]:
    """Copies of model and likelihood in evaluation mode; `event_dims` is 2 for multitask models, else 1."""
    known, before = unexpanded(model.train_inputs or ()), model.train_targets
    points = checked_inputs(known, list(inputs))
    if len({x.shape[-2] for x in points}) > 1:
        raise ValueError(f"All new inputs need the same number of rows, got shapes {[tuple(x.shape) for x in points]}.")
    # A list of targets may have several for each input.
    per_input = before.shape[-1] // known[0].shape[-2] if event_dims == 1 else 1
    _check_targets(targets, before, points[0].shape[-2] * per_input, event_dims)
    _check_noise(noise, likelihood, targets)
    batch = common_batch(*(x.shape[:-2] for x in (*known, *points)))
    noises = () if noise is None else (likelihood.noise_covar.noise.shape[:-1], noise.shape[:-1])
    members = common_batch(batch, before.shape[:-event_dims], targets.shape[:-event_dims], *noises)
    stacked = [_stacked(old, new, batch, -2).detach() for old, new in zip(known, points, strict=True)]
    model, likelihood = copy.deepcopy((model, likelihood))
    for module in (*model.modules(), *likelihood.modules()):
        module.training = False  # GPyTorch's InducingPointKernel copies itself into training mode
    model.set_train_data(
        [x.expand(*members, *x.shape[-2:]) for x in stacked],
        _stacked(before, targets, members, -event_dims).detach(),
        strict=False,
    )
    if noise is not None:
        old = likelihood.noise_covar.noise
        shape = common_batch(old.shape[:-1], noise.shape[:-1])
        likelihood.noise_covar = FixedGaussianNoise(noise=_stacked(old, noise, shape, -1).detach())
    return model, likelihood


def _check_targets(targets: Tensor, before: Tensor, count: int, event_dims: int) -> None:
    wanted = (count, *before.shape[len(before.shape) - event_dims + 1 :])
    if targets.dim() < event_dims or tuple(targets.shape[-event_dims:]) != wanted:
        raise ValueError(
            f"The new targets must have the shape {wanted}, one row for each new input, or a batch of it; got "
            f"{tuple(targets.shape)}."
        )
    check_same_kind("The tensor of new targets", targets, "the training targets", before)
    may_be_missing = gpytorch.settings.observation_nan_policy.value() != "ignore"
    check_finite("targets", torch.where(torch.isnan(targets), 0, targets) if may_be_missing else targets)


def _check_noise(noise: Tensor | None, likelihood: Likelihood, targets: Tensor) -> None:
    name = type(likelihood).__name__
    if not isinstance(likelihood, FixedNoiseGaussianLikelihood):
        if noise is not None:
            raise ValueError(
                f"{name} has its own noise: leave noise= out, which is for a FixedNoiseGaussianLikelihood. For acquisition "
                "functions that pass it (joint entropy search), model.train(); model.eval() restores GPyTorch's own dense "
                "predictions."
            )
        return
    if noise is None:
        raise ValueError(
            f"{name} needs the noise variances of the new observations: pass noise= of shape {tuple(targets.shape)}."
        )
    check_same_kind("The noise", noise, "the new targets", targets)
    if noise.shape[-1:] != targets.shape[-1:]:
        raise ValueError(
            f"noise must have the shape {tuple(targets.shape)} of the new targets, got {tuple(noise.shape)}."
        )
    if gpytorch.settings.observation_nan_policy.value() != "ignore":
        noise = torch.where(torch.isnan(targets), 1, noise)  # that of missing data has no meaning
    check_finite("noise", noise)
    if bool((noise <= 0).any()):
        raise ValueError(f"All noise variances must be positive, got {noise.min().item()}.")


def _stacked(old: Tensor, new: Tensor, batch: torch.Size, dim: int) -> Tensor:
    return torch.cat([part.expand(*batch, *part.shape[dim:]) for part in (old, new)], dim=dim)


#: New and old rows of one local solve.
NEW_ROWS, NEIGHBOURS = 1024, 1024
ROWS_COMPARED = 4
ROWS_AT_A_TIME = 128


def new_rows(operator: LinearOperator, size: int) -> Tensor:
    return dense_rows(operator, torch.arange(size, operator.shape[-1], device=operator.device))


def has_grown_from(before: TrainingSystem, after: TrainingSystem) -> bool:
    """Whether a system begins with an earlier one, by means, diagonals and a few rows.

    A prior may depend on all inputs together.
    """
    old, new = before.operator, after.operator
    size, dtype = old.shape[-1], old.dtype
    index = torch.linspace(0, size - 1, ROWS_COMPARED, device=old.device).long()
    pairs = (
        (before.residual, after.residual),
        (old.diagonal(dim1=-2, dim2=-1), new.diagonal(dim1=-2, dim2=-1)),
        (dense_rows(old, index), dense_rows(new, index)),
    )
    tolerance = max(torch.finfo(dtype).eps ** 0.5, 1e-6)
    return all(bool(((a - b[..., :size]).abs() <= tolerance * b.abs().amax()).all()) for a, b in pairs)


def padded(columns: Tensor, shape: torch.Size) -> Tensor:
    """[*a, n, s] to [*b, n + m, s], with zeros."""
    columns = columns.expand(*shape[:-1], *columns.shape[-2:])
    return pad(columns, (0, 0, 0, shape[-1] - columns.shape[-2]))


def locally_corrected(operator: LinearOperator, rhs: Tensor, guess: Tensor, size: int) -> tuple[Tensor, float]:
    """The guess [*b, n, s] after local solves for the rows from `size` on, and the epochs."""
    epochs = 0.0
    for rows in torch.arange(size, operator.shape[-1], device=operator.device).split(NEW_ROWS):
        index = _neighbourhood(operator, rows)
        residual = rhs - operator._matmul(guess)
        columns = index.unsqueeze(-1).expand(*index.shape, rhs.shape[-1])
        lower = block_factors(principal_blocks(operator, index.unsqueeze(-2)).squeeze(-3).double())
        step = torch.cholesky_solve(residual.gather(-2, columns).double(), lower)
        guess = guess.scatter_add(-2, columns, step.to(guess.dtype))
        epochs += 1.0 + len(rows) / operator.shape[-1]
    return guess, epochs


def _neighbourhood(operator: LinearOperator, rows: Tensor) -> Tensor:
    score = sum(dense_rows(operator, part).square().sum(-2) for part in rows.split(ROWS_AT_A_TIME))
    score[..., rows] = torch.inf
    return score.topk(min(len(rows) + NEIGHBOURS, operator.shape[-1]), dim=-1).indices

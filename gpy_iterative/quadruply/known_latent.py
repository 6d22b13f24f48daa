"""The latent function at points where it is known from all features.

The tail's latent moments are computed once from all features; then changes of weights are added. The unbiased gradient is
that of sampled features U times (all features) / |U|.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from gpy_iterative.quadruply.model import QuadruplyStochasticGP
from gpy_iterative.quadruply.samples import Head, KnownValues, Sample
from gpy_iterative.training.run import Part


@dataclass(frozen=True)
class KnownLatent:
    """The latent function at p points, a part of a run. `frozen` is a model of `freeze`."""

    x: Tensor  # [p, d]
    head: Tensor  # head features, [p, h]
    total: Tensor  # Phi (mu, C_d) of the tail, [p, 1 + k], float64
    weights: Tensor  # (mu, C_d) of `total`, [m, 1 + k]
    sampled: Tensor  # rows of the last evaluation's samples, [t]
    features: Tensor  # of these rows, [p, t]
    writes: Tensor  # writes to basis buffers before `head`

    @classmethod
    @torch.no_grad()
    def start(cls, frozen: QuadruplyStochasticGP, x: Tensor) -> "KnownLatent":
        """At x [p, d]; cost p m (1 + k)."""
        head, weights = frozen.head_features(x), _weights(frozen)
        none = torch.empty(0, dtype=torch.int64, device=x.device)
        total = _product(frozen, x, head, weights)
        return cls(x, head, total, weights, none, x.new_empty(len(x), 0), _writes(frozen))

    def follows(self, model: QuadruplyStochasticGP) -> bool:
        """Whether basis and points still fit the model."""
        like = model.basis.like
        return bool(self.writes == _writes(model)) and (self.x.dtype, self.x.device) == (like.dtype, like.device)

    @torch.no_grad()
    def caught_up(self, frozen: QuadruplyStochasticGP) -> "KnownLatent":
        """At present weights; cost m (1 + k) + p t (1 + k), and features of unsampled rows that moved."""
        weights = _weights(frozen)
        moves = weights - self.weights
        known = moves[self.sampled]
        if moves.count_nonzero() == known.count_nonzero():
            change = (self.features @ known).double()
        else:
            change = _product(frozen, self.x, self.head, moves)
        after = replace(self, total=self.total + change, weights=weights)
        return after if after.total.isfinite().all() else KnownLatent.start(frozen, self.x)

    def evaluate(
        self, frozen: QuadruplyStochasticGP, first: Sample, second: Sample
    ) -> tuple[KnownValues, "KnownLatent"]:
        """Values and next state."""
        left = frozen.tail_features(self.x, self.head, first.groups)
        right, rows, features = left, first.rows.joined, left
        index, path = first.index, left @ (rows - rows.detach())
        if second is not first:
            right, more = frozen.tail_features(self.x, self.head, second.groups), second.rows.joined
            new = ~torch.isin(second.index, first.index)
            path = path + right @ ((more - more.detach()) * new.unsqueeze(-1))
            index, features = torch.cat([index, second.index[new]]), torch.cat([left, right[:, new]], dim=-1)
        total = self.total.to(self.x.dtype) + frozen.weights.num_tail / max(len(index), 1) * path
        values = KnownValues(Head.of(frozen, self.head), total, left, right)
        return values, replace(self, sampled=index, features=features.detach())

    @classmethod
    def resumed(cls, model: QuadruplyStochasticGP, part: Part) -> "KnownLatent":
        """From a loaded part; raises as `check_entries`."""
        names = [field.name for field in fields(cls)]
        check_entries(part, dict.fromkeys(names))
        columns, points = 1 + model.weights.num_dense_columns, len(part["x"])
        shapes = {
            "total": (points, columns),
            "head": (points, model.weights.num_head),
            "weights": (model.weights.num_tail, columns),
            "features": (points, len(part["sampled"])),
        }
        check_entries(part, shapes)
        return replace(cls(**{name: part[name] for name in names}), writes=_writes(model))


def freeze(model: QuadruplyStochasticGP, hyperparameters: Part) -> QuadruplyStochasticGP:
    """A copy with given basis hyperparameters; shares the weights."""
    shared = (*model.buffers(), *model.basis.sampled_parameters(), model.weights)
    frozen = copy.deepcopy(model, {id(part): part for part in shared})
    for name, value in hyperparameters.items():
        frozen.basis.get_parameter(name).requires_grad_(False).copy_(value)
    return frozen


def check_entries(part: Part, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
    """Raises ValueError for a missing entry or another shape; None is any shape."""
    for name, shape in shapes.items():
        if name not in part:
            raise ValueError(f"This is no training state of this model: it has no entry {name!r}.")
        if shape is not None and part[name].shape != shape:
            raise ValueError(
                f"This is the training state of another model: its {name!r} has shape {tuple(part[name].shape)}, that of "
                f"this model {shape}."
            )


def _weights(model: QuadruplyStochasticGP) -> Tensor:
    """A copy, [m, 1 + k]."""
    mean, columns = model.weights.tail_mean.detach(), model.weights.tail_columns.detach()
    return torch.cat([mean, columns], dim=-1) if columns.numel() else mean.clone()  # far faster


def _product(model: QuadruplyStochasticGP, x: Tensor, head: Tensor, weights: Tensor) -> Tensor:
    """Phi(x) times weights [m, 1 + k], skipping groups of zeros: [p, 1 + k], float64."""
    total = x.new_zeros(len(x), weights.shape[-1], dtype=torch.float64)
    every = model.basis.feature_index(torch.arange(model.num_tail_groups, device=x.device))
    used = weights.any(-1)[every].view(model.basis.group_size, -1).any(0)
    for groups in model.tail_blocks(used):
        total += (model.tail_features(x, head, groups) @ weights[model.basis.feature_index(groups)]).double()
    return total


def _writes(model: QuadruplyStochasticGP) -> Tensor:
    """In-place writes to basis buffers. Inference tensors count none."""
    return torch.tensor(sum(tensor._version for tensor in model.basis.buffers() if not tensor.is_inference()))

"""The latent function at points where it is known from all features, while a step moves the weights of a few.

At points x the sampled groups' part a = Phi(x) mu, and Phi(x) times the dense columns of C, is computed once from all
features. After every step the moves of the sampled rows are added. The gradient through a is taken at the sampled features
U only and multiplied by (all features) / |U|: unbiased for a uniform U.

An evaluation notes which rows the next step moves. Where others move as well (rows of another objective or other points, or
weights that are set by hand), the state is computed again from all features.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.errors import ApproximationWarning, warn
from gpy_iterative.quadruply.feature_weights import num_writes
from gpy_iterative.quadruply.model import QuadruplyStochasticGP
from gpy_iterative.quadruply.samples import Head, Sample
from gpy_iterative.training.run import Part

#: Features that are evaluated at a time.
BLOCK = 8192
#: Rows of the weights that are compared to find moves of rows that were not sampled.
NUM_WATCHED = 32
#: Evaluations before one step whose rows are noted.
MAX_PENDING = 8


@dataclass(frozen=True)
class KnownValues:
    """What all features give at p points, with the gradient of two samples."""

    head: Head
    total: Tensor  # Phi (mu, C_d) over all sampled groups, [p, 1 + k]
    left: Tensor  # features of the first sample, [p, t]
    right: Tensor  # features of the second sample, [p, t]

    @property
    def mean(self) -> Tensor:
        """The latent mean without the mean module's, [p]."""
        return self.head.mean + self.total[:, 0]

    @property
    def root(self) -> Tensor:
        """Phi(x) times the dense columns of C, [p, k]."""
        return self.head.root + self.total[:, 1:]


@dataclass(frozen=True)
class KnownLatent:
    """State of the latent function at p points; the methods return the next state.

    `frozen` is a model of `freeze`, which has the trained weights.
    """

    x: Tensor  # [p, d]
    head: Tensor  # features of the head, [p, h]
    total: Tensor  # Phi (mu, C_d) over all sampled groups, [p, 1 + k], float64
    watched: Tensor  # some rows of the weights, as last seen, [w, 1 + k]
    pending: Tensor  # rows of the weights that the next step moves, [t]
    pending_features: Tensor  # [p, t]
    pending_values: Tensor  # of these rows, when `total` was computed, [t, 1 + k]
    steps: int  # since `total` was computed from all features
    writes: int  # `FeatureWeights.writes` when last seen
    step_writes: int  # writes of one step, the fewest seen; 0 before the first
    revision: int  # of the model
    is_incomplete: bool  # the next step moves other rows than the pending ones
    has_warned: bool  # of moves of other rows

    @classmethod
    @torch.no_grad()
    def start(cls, frozen: QuadruplyStochasticGP, x: Tensor, before: "KnownLatent | None" = None) -> "KnownLatent":
        """At points x [p, d]; cost p m (1 + k). `before` is the state at other points that this one replaces."""
        head, columns = frozen.head_features(x), 1 + frozen.weights.num_dense_columns
        none = torch.empty(0, dtype=torch.int64, device=x.device)
        state = cls(
            x=x,
            head=head,
            total=x.new_empty(0),
            watched=x.new_empty(0),
            pending=none,
            pending_features=x.new_empty(len(x), 0),
            pending_values=x.new_empty(0, columns),
            steps=0,
            writes=0,
            step_writes=0 if before is None else before.step_writes,
            revision=0,
            is_incomplete=frozen.weights.awaits_step,
            has_warned=before is not None and before.has_warned,
        )
        return state.refreshed(frozen)

    @torch.no_grad()
    def refreshed(self, frozen: QuadruplyStochasticGP) -> "KnownLatent":
        """Computed again from all features; cost p m (1 + k)."""
        weights = frozen.weights
        total = self.x.new_zeros(len(self.x), 1 + weights.num_dense_columns, dtype=torch.float64)
        if weights.tail_mean.any() or weights.tail_columns.any():  # all zero at the first step
            for groups in frozen.tail_blocks(BLOCK):
                features = frozen.tail_features(self.x, self.head, groups)
                total += (features @ _values(frozen, frozen.basis.feature_index(groups))).double()
        return replace(
            self,
            total=total,
            watched=_values(frozen, _watched(frozen)),
            pending_values=_values(frozen, self.pending),
            steps=0,
            writes=weights.writes,
            revision=_revision(frozen),
            is_incomplete=self.is_incomplete and weights.awaits_step,
        )

    def follows(self, model: QuadruplyStochasticGP) -> bool:
        """Whether all changes of the weights are known: none by load_state_dict or the steps of another objective."""
        like = model.basis.like
        return self.revision == _revision(model) and (self.x.dtype, self.x.device) == (like.dtype, like.device)

    @torch.no_grad()
    def caught_up(self, frozen: QuadruplyStochasticGP, refresh_every: int | None = None) -> "KnownLatent":
        """After what the optimiser has moved; with `refresh_every`, counts one step towards the next refresh."""
        moves = _values(frozen, self.pending) - self.pending_values
        has_moved, writes = bool(moves.any()), frozen.weights.writes - self.writes
        watched = _values(frozen, _watched(frozen))
        foreign = (watched != self.watched).any(-1) & ~torch.isin(_watched(frozen), self.pending)
        has_stepped, is_foreign = has_moved or writes != 0, bool(foreign.any())
        # Every step of an optimiser writes to the weights as often: other numbers of writes are those of a hand.
        is_by_hand = has_stepped and not (has_moved and self.step_writes in (0, writes))
        after = replace(self, watched=watched, writes=frozen.weights.writes)
        if has_moved:
            after = after._with_moves(moves, writes)
        if refresh_every is not None:
            after = replace(after, steps=self.steps + 1)
        if is_foreign and not self.is_incomplete and not self.has_warned:
            after = after._warned()
        is_due = refresh_every is not None and after.steps >= refresh_every
        if is_foreign or is_by_hand or is_due or (has_stepped and self.is_incomplete):
            return after.refreshed(frozen)
        return after

    def evaluate(
        self, frozen: QuadruplyStochasticGP, first: Sample, second: Sample
    ) -> tuple[KnownValues, "KnownLatent"]:
        """The values at the points, whose gradient is that of the samples' rows times (all) / (rows in either).

        Also returns the state after the evaluation, which expects a step to move these rows.
        """
        left = frozen.tail_features(self.x, self.head, first.groups)
        right, rows, features = left, first.rows.joined, left
        index, path = first.index, left @ (rows - rows.detach())
        if second is not first:
            right, more = frozen.tail_features(self.x, self.head, second.groups), second.rows.joined
            new = ~torch.isin(second.index, first.index)
            path = path + right @ ((more - more.detach()) * new.unsqueeze(-1))
            index, rows = torch.cat([index, second.index[new]]), torch.cat([rows, more[new]])
            features = torch.cat([left, right[:, new]], dim=-1)
        total = self.total.to(self.x.dtype) + frozen.weights.num_tail / max(len(index), 1) * path
        values = KnownValues(Head.of(frozen, self.head), total, left, right)
        after = self._expecting(index, features.detach(), rows.detach())
        return values, replace(after, revision=_revision(frozen) + 1)

    def _with_moves(self, moves: Tensor, writes: int) -> "KnownLatent":
        return replace(
            self,
            total=self.total.double() + (self.pending_features @ moves).double(),
            pending=self.pending[:0],
            pending_features=self.x.new_empty(len(self.x), 0),
            pending_values=self.pending_values[:0],
            step_writes=min(self.step_writes or writes, writes) if writes > 0 else self.step_writes,
        )

    def _expecting(self, index: Tensor, features: Tensor, values: Tensor) -> "KnownLatent":
        is_full = len(self.pending) > MAX_PENDING * len(index)
        if len(self.pending) and not is_full:  # their values are already those of `total`
            new = ~torch.isin(index, self.pending)
            index = torch.cat([self.pending, index[new]])
            features = torch.cat([self.pending_features, features[:, new]], dim=-1)
            values = torch.cat([self.pending_values, values[new]])
        return replace(
            self,
            pending=index,
            pending_features=features,
            pending_values=values,
            is_incomplete=self.is_incomplete or is_full,
        )

    def _warned(self) -> "KnownLatent":
        warn(
            "Weights outside of the step's sample have moved: by an optimiser with momentum or weight decay, or by hand. "
            "The latent function at the kept rows or control points is then computed again from all features, which is "
            "slow, and it is wrong until the move is seen. Use torch.optim.Adagrad, SGD without momentum or SparseAdam, "
            "or pass num_steps_per_batch=1 and num_control_points=0.",
            ApproximationWarning,
        )
        return replace(self, has_warned=True)

    def part(self) -> Part:
        """As the tensors of a part of a run."""
        return {field.name: torch.as_tensor(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of(cls, part: Part) -> "KnownLatent":
        """The inverse of `part`."""
        values: dict[str, Any] = {
            field.name: field.type(part[field.name]) if field.type in (int, bool) else part[field.name]
            for field in fields(cls)
        }
        return cls(**values)

    @classmethod
    def resumed(cls, model: QuadruplyStochasticGP, part: Part) -> "KnownLatent":
        """From a loaded part, which belongs to the model's present weights.

        Raises ValueError where entries are missing or have other shapes than this model's.
        """
        check_entries(part, dict.fromkeys(field.name for field in fields(cls)))
        columns, points = 1 + model.weights.num_dense_columns, len(part["x"])
        shapes = {
            "total": (points, columns),
            "head": (points, model.weights.num_head),
            "watched": (len(_watched(model)), columns),
            "pending_features": (points, len(part["pending"])),
            "pending_values": (len(part["pending"]), columns),
        }
        check_entries(part, shapes)
        weights = model.weights
        return replace(
            cls.of(part), writes=weights.writes, revision=_revision(model), is_incomplete=weights.awaits_step
        )


def freeze(model: QuadruplyStochasticGP, hyperparameters: Iterable[Tensor]) -> QuadruplyStochasticGP:
    """A copy whose features stay at the given hyperparameters, in the order of `feature_parameters`; shares the weights."""
    shared = (*model.buffers(), *model.basis.sampled_parameters(), model.weights)
    frozen = copy.deepcopy(model, {id(part): part for part in shared})
    for parameter, value in zip(frozen.basis.feature_parameters(), hyperparameters, strict=True):
        parameter.requires_grad_(False).copy_(value)
    return frozen


def check_entries(part: Part, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
    """Raises ValueError where an entry is missing or has another shape; None is any shape."""
    for name, shape in shapes.items():
        if name not in part:
            raise ValueError(f"This is no training state of this model: it has no entry {name!r}.")
        if shape is not None and part[name].shape != shape:
            raise ValueError(
                f"This is the training state of another model: its {name!r} has shape {tuple(part[name].shape)}, that of "
                f"this model {shape}."
            )


def _revision(model: QuadruplyStochasticGP) -> int:
    """A number that grows with evaluations, with loaded states, and with writes to the basis' buffers."""
    return model.weights.revision + num_writes(model.basis.buffers())


def _watched(model: QuadruplyStochasticGP) -> Tensor:
    tail = model.weights.num_tail
    count = min(NUM_WATCHED, tail)
    return torch.arange(count, device=model.device) * tail // max(count, 1)


def _values(model: QuadruplyStochasticGP, index: Tensor) -> Tensor:
    """Mean and dense columns at rows of the tail, [t, 1 + k], detached."""
    return model.weights.tail_rows(index, sparse=False).joined.detach()

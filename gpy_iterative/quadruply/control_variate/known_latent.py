"""The latent function at points where it is known: from all features, though a step moves the weights of a few.

At points x the sampled groups' part a = Phi(x) mu (and Phi(x) times the dense columns of C) is worked out once, from all
features, and then updated by the rows that a step has moved. A step evaluates a sample U of the features alone, so the
gradient through a is taken on U and multiplied by (all features) / |U|: unbiased for a uniform U.

Which rows a step moves is announced by the evaluations before it. Where it moves others as well (those of an evaluation at
other points, of another objective, or too long ago), or weights are set beside the steps, the state is worked out anew.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpy_iterative.changes import version
from gpy_iterative.errors import ApproximationWarning, warn
from gpy_iterative.quadruply.feature_samples import Sample
from gpy_iterative.quadruply.model import QuadruplyStochasticGP

#: Features that are evaluated at a time when the state is worked out anew.
BLOCK = 8192
#: Rows of the parameters that are watched for moves that no step has announced.
NUM_WATCHED = 32
#: Evaluations without a step between them whose rows are remembered.
MAX_ANNOUNCED = 8


@dataclass
class _Announced:
    """Rows that the next step of the optimiser moves: where they are, their features at the points, their values."""

    index: Tensor
    features: Tensor
    before: Tensor


@dataclass
class KnownLatent:
    """The state of one run at one set of points.

    Attributes:
        x: points [p, d].
        basis_model: the model with its basis frozen at the hyperparameters of the start.
        head: its head at the points, [p, h].
        total: Phi (mu, C_d) at the points over the groups that are sampled, [p, 1 + k], float64.
        watched: rows of the parameters whose moves are checked, [w].
        watched_values: as they were last seen, [w, 1 + k].
        announced: moves that have not been applied.
        steps: since the state was worked out from all features.
        is_incomplete: the next step moves rows that are not announced: it makes all be worked out anew.
        versions: of the weights, when they were last looked at.
        writes: how often a step writes to the weights, the fewest times seen; 0 before the first.
        buffer_versions: of the basis' buffers, at the start.
        revision: of the weights, to which the state belongs.
        has_warned: whether the user knows of an optimiser that moves untouched rows.
    """

    x: Tensor
    basis_model: QuadruplyStochasticGP
    head: Tensor
    total: Tensor
    watched: Tensor
    watched_values: Tensor
    announced: list[_Announced] = field(default_factory=list)
    steps: int = 0
    is_incomplete: bool = False
    versions: tuple[object, ...] = ()
    writes: int = 0
    buffer_versions: tuple[object, ...] = ()
    revision: int = 0
    has_warned: bool = False

    @classmethod
    @torch.no_grad()
    def start(
        cls, model: QuadruplyStochasticGP, x: Tensor, frozen: QuadruplyStochasticGP | None = None
    ) -> "KnownLatent":
        """At points x [p, d]; cost p m (1 + k). `frozen` is the basis model of another one, with the same features."""
        frozen = _frozen(model) if frozen is None else frozen
        head = frozen.head_features(x)
        state = cls(x, frozen, head, head.new_empty(0), _watched(model), head.new_empty(0))
        state.buffer_versions = _buffer_versions(model)
        state.refresh(model)
        state.is_incomplete = model.weights.awaits_step
        return state

    def moved_to(self, model: QuadruplyStochasticGP, x: Tensor) -> "KnownLatent":
        """Another one, of the same run, at other points, and at the model's current weights and hyperparameters."""
        state = KnownLatent.start(model, x)
        state.has_warned = self.has_warned
        return state

    def follows(self, model: QuadruplyStochasticGP) -> bool:
        """Whether what has become of the weights is known: no other state was loaded, no other objective made steps."""
        like = model.basis.like
        is_same_run = self.revision == model.weights.revision and self.buffer_versions == _buffer_versions(model)
        return is_same_run and (self.x.dtype, self.x.device) == (like.dtype, like.device)

    def has_features_of(self, model: QuadruplyStochasticGP) -> bool:
        """Whether the kernel's hyperparameters are still those of the start."""
        pairs = zip(self.basis_model.basis.feature_parameters(), model.basis.feature_parameters(), strict=True)
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)

    @torch.no_grad()
    def refresh(self, model: QuadruplyStochasticGP) -> None:
        """Works the state out from all features: p m (1 + k)."""
        total = torch.zeros(len(self.x), 1 + model.weights.num_dense_columns, dtype=torch.float64, device=self.x.device)
        weights = model.weights
        is_zero = not (weights.tail_mean.any() or weights.tail_columns.any())  # as every run begins
        for groups in () if is_zero else self.basis_model.tail_blocks(BLOCK):
            features = self.basis_model.tail_features(self.x, self.head, groups)
            total += (features @ _values(model, model.basis.feature_index(groups))).double()
        self.total, self.steps, self.revision = total, 0, weights.revision
        self.watched_values, self.versions = _values(model, self.watched), weights.versions()
        if not weights.awaits_step:
            self.announced, self.is_incomplete = [], False
        for part in self.announced:
            part.before = _values(model, part.index)

    @torch.no_grad()
    def catch_up(self, model: QuadruplyStochasticGP, refresh_every: int | None = None) -> None:
        """Applies what the optimiser has moved since the last step, and counts one more towards the next refresh.

        None only applies.
        """
        now = _values(model, self.watched)
        foreign = (now != self.watched_values).any(-1)
        for part in self.announced:
            foreign &= ~torch.isin(self.watched, part.index)
        is_foreign, any_moved = bool(foreign.any()), self._take_in(model)
        has_stepped = any_moved or self.versions != model.weights.versions()
        is_by_hand = has_stepped and not (any_moved and self._are_writes_of_a_step(model))
        self.watched_values, self.versions = now, model.weights.versions()
        self.steps += refresh_every is not None
        if is_foreign and not self.is_incomplete and not self.has_warned:
            warn(
                "Weights that a step has not touched were moved: by an optimiser with momentum or weight decay, or by "
                "hand. What is known of the latent function (at rows that are kept, or a control variate's points) is "
                "worked out anew from all features whenever this is seen, which is slow, and wrong in between. Take "
                "torch.optim.Adagrad, SGD without momentum, or SparseAdam; or know nothing: num_steps_per_batch=1 and "
                "num_control_points=0.",
                ApproximationWarning,
            )
            self.has_warned = True
        is_due = refresh_every is not None and self.steps >= refresh_every
        if is_foreign or is_by_hand or is_due or (has_stepped and self.is_incomplete):
            self.refresh(model)

    def _are_writes_of_a_step(self, model: QuadruplyStochasticGP) -> bool:
        """Whether nobody wrote to the weights beside the optimiser, whose steps all write to them as often."""
        pairs = zip(model.weights.versions(), self.versions, strict=True)
        writes = sum(now - then for now, then in pairs if isinstance(now, int) and isinstance(then, int))
        is_as_ever = self.writes in (0, writes)
        self.writes = min(self.writes or writes, writes)
        return is_as_ever

    def _take_in(self, model: QuadruplyStochasticGP) -> bool:
        """Adds what announced rows have moved; a step moves those of all evaluations before it. Whether any have."""
        any_moved = False
        for part in self.announced:
            after = _values(model, part.index)
            difference = after - part.before
            if bool(difference.any()):
                any_moved = True
                self.total += (part.features @ difference).double()
        if any_moved:
            self.announced = []
            model.weights.acknowledge_step()
        return any_moved

    def at(self, model: QuadruplyStochasticGP, first: Sample, second: Sample) -> tuple[Tensor, Tensor, Tensor]:
        """The samples' features at the points [p, t], and what all features together have there [p, 1 + k].

        The gradient of the latter is that of the rows in either sample, times (all) / (touched). An optimiser's step that
        follows is to move these rows alone.
        """
        left = self.basis_model.tail_features(self.x, self.head, first.groups)
        right = left if second is first else self.basis_model.tail_features(self.x, self.head, second.groups)
        path, index, features, values = left @ _moving(first), first.index, left, _rows(first)
        if second is not first:
            fresh = ~torch.isin(second.index, first.index)
            path = path + right @ (_moving(second) * fresh.unsqueeze(-1))
            index, features = torch.cat([index, second.index[fresh]]), torch.cat([left, right[:, fresh]], dim=-1)
            values = torch.cat([values, _rows(second)[fresh]])
        total = self.total.to(self.x.dtype) + model.weights.num_tail / max(len(index), 1) * path
        if torch.is_grad_enabled():
            self._announce(index, features, values.detach())
        return left, right, total

    def _announce(self, index: Tensor, features: Tensor, values: Tensor) -> None:
        for part in self.announced:  # rows of a step that has not been made yet are in it already
            new = ~torch.isin(index, part.index)
            index, features, values = index[new], features[:, new], values[new]
        self.announced.append(_Announced(index, features.detach(), values))
        if len(self.announced) > MAX_ANNOUNCED:
            self.announced, self.is_incomplete = self.announced[1:], True

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors, by name; call `catch_up` before."""
        state = {name: getattr(self, name).clone() for name in ("x", "total", "watched_values")}
        state["steps"] = torch.tensor(self.steps)
        basis = self.basis_model.basis.named_parameters()
        return state | {f"basis.{name}": parameter.detach().clone() for name, parameter in basis}

    @classmethod
    @torch.no_grad()
    def from_dict(cls, model: QuadruplyStochasticGP, state: dict[str, Tensor]) -> "KnownLatent":
        """The inverse of `to_dict`. Raises ValueError for entries that are missing or of another shape."""
        basis = {f"basis.{name}": parameter.shape for name, parameter in model.basis.named_parameters()}
        check_entries(state, {"x", "total", "watched_values", "steps", *basis})
        watched, columns = _watched(model), 1 + model.weights.num_dense_columns
        shapes = {"total": (len(state["x"]), columns), "watched_values": (len(watched), columns)} | basis
        for name, shape in shapes.items():
            if state[name].shape != shape:
                raise ValueError(
                    f"This is the training state of another model: its {name!r} has shape {tuple(state[name].shape)}, that "
                    f"of this model {tuple(shape)}."
                )
        frozen = _frozen(model)
        for name, parameter in frozen.basis.named_parameters():
            parameter.copy_(state[f"basis.{name}"])
        like = model.basis.like
        x, values = (state[name].clone().to(like) for name in ("x", "watched_values"))
        restored = cls(x, frozen, frozen.head_features(x), state["total"].clone().to(like.device), watched, values)
        restored.steps, restored.revision = int(state["steps"]), model.weights.revision
        restored.versions, restored.buffer_versions = model.weights.versions(), _buffer_versions(model)
        restored.is_incomplete = model.weights.awaits_step
        return restored

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves or converts all tensors."""
        for name in ("x", "head", "total", "watched", "watched_values"):
            setattr(self, name, function(getattr(self, name)))
        self.total = self.total.double()
        self.basis_model._apply(function)
        for part in self.announced:
            part.index, part.features, part.before = map(function, (part.index, part.features, part.before))


def check_entries(state: dict[str, Tensor], names: set[str]) -> None:
    """Raises ValueError where one is missing."""
    if missing := names - state.keys():
        raise ValueError(f"This is no training state of this model: it has no entry {sorted(missing)[0]!r}.")


def _frozen(model: QuadruplyStochasticGP) -> QuadruplyStochasticGP:
    """The model with hyperparameters that stay; what no optimiser moves is shared, and so are the weights."""
    shared = {id(tensor): tensor for tensor in model.buffers()} | {id(model.weights): model.weights}
    frozen = copy.deepcopy(model, shared)
    for parameter in frozen.basis.parameters():
        parameter.requires_grad_(False)
    return frozen


def _buffer_versions(model: QuadruplyStochasticGP) -> tuple[object, ...]:
    return tuple(version(buffer) for buffer in model.basis.buffers())


def _watched(model: QuadruplyStochasticGP) -> Tensor:
    tail = model.weights.num_tail
    count = min(NUM_WATCHED, tail)
    return torch.arange(count, device=model.device) * tail // max(count, 1)


def _values(model: QuadruplyStochasticGP, index: Tensor) -> Tensor:
    """Mean and dense columns at rows of the tail, [t, 1 + k], detached."""
    weights = model.weights
    return torch.cat([weights.tail_mean.detach()[index], weights.tail_columns.detach()[index]], dim=-1)


def _rows(sample: Sample) -> Tensor:
    return torch.cat([sample.rows.mean.unsqueeze(-1), sample.rows.columns], dim=-1)


def _moving(sample: Sample) -> Tensor:
    """Zero, with the gradient of the sample's rows."""
    rows = _rows(sample)
    return rows - rows.detach()

"""A control variate for the data term of sampled features: the same quadratic forms at points of which all is known.

At support points p, drawn once, the sampled groups' part of the latent mean a = Phi_p mu is kept, and updated by the
rows that a step has moved. The residual form

    sum_p [ (r - a)^2 - (r - v_i)(r - v_j) ] / noise,    v_i = weight Phi_{p,i} mu_i,

has expectation zero over the index sets i, j, in value and in gradient, and is what the data term's noise looks like
(Evans and Nair 2018, equation 3, has a^2 - v_i v_j; the residual form also answers for the cross term with the targets).
A step moves the rows U = i + j alone, so the gradient through a is evaluated on U and multiplied by (all groups) / |U|.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpy_iterative.errors import ApproximationWarning
from gpy_iterative.mlls.feature_samples import Head, Sample
from gpy_iterative.models import QuadruplyStochasticGP

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
class ControlVariate:
    """The state of one run.

    Attributes:
        x, y: support points [p, d] and their targets [p].
        noise: their fixed noise variances [p]; None where all have the likelihood's.
        basis_model: the model with its basis frozen at the hyperparameters of the start.
        head: its head at the points, [p, h].
        total: Phi_p (mu, C_d) over the groups that are sampled, [p, 1 + k], float64.
        watched: rows of the parameters whose moves are checked, [w].
        watched_values: as they were last seen, [w, 1 + k].
        announced: moves that have not been applied.
        steps: since the state was worked out from all features.
        overflowed: rows of older evaluations have been forgotten: when anything moves, all is worked out anew.
        revision: of the weights, to which the state belongs.
        has_warned: whether the user knows of an optimiser that moves untouched rows.
    """

    x: Tensor
    y: Tensor
    noise: Tensor | None
    basis_model: QuadruplyStochasticGP
    head: Tensor
    total: Tensor
    watched: Tensor
    watched_values: Tensor
    announced: list[_Announced] = field(default_factory=list)
    steps: int = 0
    overflowed: bool = False
    revision: int = 0
    has_warned: bool = False

    @classmethod
    def start(cls, model: QuadruplyStochasticGP, x: Tensor, y: Tensor, noise: Tensor | None) -> "ControlVariate":
        """At support points x [p, d] with targets y [p] and fixed noise [p] (or None); cost p m (1 + k)."""
        frozen = _frozen(model)
        with torch.no_grad():
            head = frozen.head_features(x)
        state = cls(x, y, noise, frozen, head, head.new_empty(0), _watched(model), head.new_empty(0))
        state.refresh(model)
        return state

    def follows(self, model: QuadruplyStochasticGP) -> bool:
        """Whether what has become of the weights is known: no other state was loaded, no other objective made steps."""
        like = model.basis.like
        return self.revision == model.weights.revision and (self.x.dtype, self.x.device) == (like.dtype, like.device)

    def restart(self, model: QuadruplyStochasticGP) -> "ControlVariate":
        """Another one at the same points, and at the model's current weights, hyperparameters and dtype."""
        like = model.basis.like
        noise = None if self.noise is None else self.noise.to(like)
        state = ControlVariate.start(model, self.x.to(like), self.y.to(like), noise)
        state.has_warned = self.has_warned
        return state

    @torch.no_grad()
    def refresh(self, model: QuadruplyStochasticGP) -> None:
        """Works the state out from all features: p m (1 + k)."""
        total = torch.zeros(len(self.x), 1 + model.weights.num_dense_columns, dtype=torch.float64, device=self.x.device)
        weights = model.weights
        is_zero = not (weights.tail_mean.any() or weights.tail_columns.any())  # as every run begins
        for groups in () if is_zero else self.basis_model.tail_blocks(BLOCK):
            features = self.basis_model.tail_features(self.x, self.head, groups)
            total += (features @ _values(model, model.basis.feature_index(groups))).double()
        self.total, self.announced, self.steps, self.overflowed = total, [], 0, False
        self.watched_values, self.revision = _values(model, self.watched), model.weights.revision

    @torch.no_grad()
    def catch_up(self, model: QuadruplyStochasticGP, refresh_every: int | None = None) -> None:
        """Applies what the optimiser has moved since the last step, and counts one more towards the next refresh.

        None only applies.
        """
        now = _values(model, self.watched)
        foreign = (now != self.watched_values).any(-1)
        for part in self.announced:
            foreign &= ~torch.isin(self.watched, part.index)
        if bool(foreign.any()):
            if not self.has_warned and not self.overflowed:
                warnings.warn(
                    "Weights that a step has not touched were moved: by an optimiser with momentum or weight decay, or by "
                    "hand. The control variate's state is worked out anew from all features whenever this is seen, which "
                    "is slow, and wrong in between. Take torch.optim.Adagrad, SGD without momentum, or SparseAdam; or "
                    "num_control_points=0.",
                    ApproximationWarning,
                    stacklevel=8,
                )
                self.has_warned = True
            self.refresh(model)
            return
        any_moved = False
        for part in self.announced:
            after = _values(model, part.index)
            difference = after - part.before
            if bool(difference.any()):
                any_moved = True
                self.total += (part.features @ difference).double()
        if any_moved:
            self.announced = []
        self.watched_values = now
        self.steps += refresh_every is not None
        if (any_moved and self.overflowed) or (refresh_every is not None and self.steps >= refresh_every):
            self.refresh(model)

    def term(
        self,
        model: QuadruplyStochasticGP,
        first: Sample,
        second: Sample,
        residual: Tensor,
        noise: Tensor,
        *,
        form: str,
    ) -> Tensor:
        """What is added to the data term, divided by the number of points: expectation zero, [].

        Args:
            model: with the parameters of this step.
            first, second: its samples.
            residual: targets minus prior mean at the points, [p], detached.
            noise: variances at the points, [p], detached: the gradient with respect to the noise would be biased by the
                factor (all groups) / |U|.
            form: "residual", or "printed" for a^2 - v_i v_j.
        """
        features = [self.basis_model.tail_features(self.x, self.head, part.groups) for part in (first, second)]
        head = Head.of(model, self.head)
        fresh = ~torch.isin(second.index, first.index)
        path = features[0] @ _moving(first) + features[1] @ (_moving(second) * fresh.unsqueeze(-1))
        touched = len(first.index) + int(fresh.sum())
        total = self.total.to(self.x.dtype) + model.weights.num_tail / max(touched, 1) * path
        if torch.is_grad_enabled():
            self._announce(first, second, features, fresh)

        target = (residual - head.mean) if form == "residual" else -head.mean
        mean = (target - total[:, 0]).square() - (target - first.mean(features[0])) * (
            target - second.mean(features[1])
        )
        root = (head.root + total[:, 1:]).square() - (head.root + first.root(features[0])) * (
            head.root + second.root(features[1])
        )
        return ((mean + root.sum(-1)).double() / noise.double()).sum() / len(self.x)

    def _announce(self, first: Sample, second: Sample, features: list[Tensor], fresh: Tensor) -> None:
        index = torch.cat([first.index, second.index[fresh]])
        matrix = torch.cat([features[0], features[1][:, fresh]], dim=-1)
        values = torch.cat([_rows(first), _rows(second)[fresh]]).detach()
        for part in self.announced:  # rows of a step that has not been made yet are in it already
            new = ~torch.isin(index, part.index)
            index, matrix, values = index[new], matrix[:, new], values[new]
        self.announced.append(_Announced(index, matrix, values))
        if len(self.announced) > MAX_ANNOUNCED:
            self.announced, self.overflowed = self.announced[1:], True

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors, by name; call `catch_up` before."""
        names = ("x", "y", "noise", "total", "watched_values")
        state = {name: value.clone() for name in names if (value := getattr(self, name)) is not None}
        state["steps"] = torch.tensor(self.steps)
        basis = self.basis_model.basis.named_parameters()
        return state | {f"basis.{name}": parameter.detach().clone() for name, parameter in basis}

    @classmethod
    @torch.no_grad()
    def from_dict(cls, model: QuadruplyStochasticGP, state: dict[str, Tensor]) -> "ControlVariate":
        """The inverse of `to_dict`. Raises ValueError for entries that are missing or of another shape."""
        names = {"x", "y", "total", "watched_values", "steps"}
        names |= {f"basis.{name}" for name, _ in model.basis.named_parameters()}
        if missing := names - state.keys():
            raise ValueError(f"This is no training state of this model: it has no entry {sorted(missing)[0]!r}.")
        watched, columns = _watched(model), 1 + model.weights.num_dense_columns
        shapes = {"y": state["x"].shape[:1], "total": (len(state["x"]), columns)}
        shapes |= {"watched_values": (len(watched), columns)}
        shapes |= {f"basis.{name}": parameter.shape for name, parameter in model.basis.named_parameters()}
        for name, shape in shapes.items():
            if state[name].shape != shape:
                raise ValueError(
                    f"This is the training state of another model: its {name!r} has shape {tuple(state[name].shape)}, that "
                    f"of this model {tuple(shape)}."
                )
        frozen = _frozen(model)
        for name, parameter in frozen.basis.named_parameters():
            parameter.copy_(state[f"basis.{name}"])
        like, names = model.basis.like, ("x", "y", "noise", "watched_values")
        x, y, noise, values = (state[name].clone().to(like) if name in state else None for name in names)
        total = state["total"].clone().to(like.device)
        restored = cls(x, y, noise, frozen, frozen.head_features(x), total, watched, values)
        restored.steps, restored.revision = int(state["steps"]), model.weights.revision
        return restored

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves or converts all tensors."""
        self.noise = None if self.noise is None else function(self.noise)
        for name in ("x", "y", "head", "total", "watched", "watched_values"):
            setattr(self, name, function(getattr(self, name)))
        self.total = self.total.double()
        self.basis_model._apply(function)
        for part in self.announced:
            part.index, part.features, part.before = map(function, (part.index, part.features, part.before))


def _frozen(model: QuadruplyStochasticGP) -> QuadruplyStochasticGP:
    """The model with hyperparameters that stay; what no optimiser moves is shared, and so are the weights."""
    shared = {id(tensor): tensor for tensor in model.buffers()} | {id(model.weights): model.weights}
    frozen = copy.deepcopy(model, shared)
    for parameter in frozen.basis.parameters():
        parameter.requires_grad_(False)
    return frozen


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

"""Points with a known latent function: rows kept for several steps, or else control points.

A run has the parts `latent` (see `KnownLatent`), `basis` (hyperparameters at its start), and either `kept` (rows' `index`
and `count` of steps) or `control` (targets `y` and fixed `noise`).
"""

import copy
from dataclasses import dataclass, replace

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from torch import Tensor

from gpy_iterative.changes import identities, same_tensor
from gpy_iterative.quadruply.data_terms import Call, control_term
from gpy_iterative.quadruply.feature_weights import Head
from gpy_iterative.quadruply.model import QuadruplyStochasticGP
from gpy_iterative.quadruply.samples import KnownValues, Sample, draw_set
from gpy_iterative.quadruply.sizes import TrainingData, control_points, steps_per_batch
from gpy_iterative.training.run import Part, Run
from gpy_iterative.worker_threads import CPU


@dataclass(frozen=True)
class KnownLatent:
    """The latent function at p points. `frozen` is a model of `freeze`."""

    x: Tensor  # [p, d]
    head: Tensor  # head features, [p, h]
    total: Tensor  # Phi (mu, C_d) of the tail, [p, 1 + k], float64
    weights: Tensor  # (mu, C_d) of `total`, [m, 1 + k]
    sampled: Tensor  # last samples' rows, [t]
    features: Tensor  # of these rows, [p, t]
    writes: Tensor  # versions and addresses of basis buffers, [k, 2]

    @classmethod
    @torch.no_grad()
    def start(cls, frozen: QuadruplyStochasticGP, x: Tensor) -> "KnownLatent":
        """Cost p m (1 + k)."""
        head, weights = frozen.head_features(x), _weights(frozen)
        none = torch.empty(0, dtype=torch.int64, device=x.device)
        total = _product(frozen, x, head, weights)
        return cls(x, head, total, weights, none, x.new_empty(len(x), 0), _identities(frozen))

    def follows(self, model: QuadruplyStochasticGP) -> bool:
        like = model.basis.like
        is_alike = (self.x.dtype, self.x.device) == (like.dtype, like.device)
        return is_alike and torch.equal(self.writes, _identities(model))

    @torch.no_grad()
    def caught_up(self, frozen: QuadruplyStochasticGP) -> "KnownLatent":
        """At present weights; cost (m + p t) (1 + k), and features of unsampled rows that moved."""
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
        """Values and next state. The gradient is that of sampled features times (all features) / (sampled ones)."""
        left = frozen.tail_features(self.x, self.head, first.groups)
        right, rows, features = left, first.rows.joined, left
        index, path = first.index, left @ (rows - rows.detach())
        if second is not first:
            right, more = frozen.tail_features(self.x, self.head, second.groups), second.rows.joined
            new = ~torch.isin(second.index, first.index)
            path = path + right @ ((more - more.detach()) * new.unsqueeze(-1))
            index, features = torch.cat([index, second.index[new]]), torch.cat([left, right[:, new]], dim=-1)
        total = self.total.to(self.x.dtype) + frozen.weights.num_tail / max(len(index), 1) * path
        head = Head(frozen.weights, self.head)
        values = KnownValues(head, head.mean + total[:, 0], head.root + total[:, 1:], left, right)
        return values, replace(self, sampled=index, features=features.detach())


def freeze(model: QuadruplyStochasticGP, hyperparameters: Part) -> QuadruplyStochasticGP:
    """A copy with other basis hyperparameters and the same weights."""
    shared = (*model.buffers(), *model.basis.sampled_parameters(), model.weights)
    frozen = copy.deepcopy(model, {id(part): part for part in shared})
    for name, value in hyperparameters.items():
        frozen.basis.get_parameter(name).requires_grad_(False).copy_(value)
    return frozen


def _weights(model: QuadruplyStochasticGP) -> Tensor:
    """A copy, [m, 1 + k]."""
    mean, columns = model.weights.tail_mean.detach(), model.weights.tail_columns.detach()
    return torch.cat([mean, columns], dim=-1) if columns.numel() else mean.clone()  # far faster


def _product(model: QuadruplyStochasticGP, x: Tensor, head: Tensor, weights: Tensor) -> Tensor:
    """Phi(x) times weights [m, 1 + k] without groups of zeros: [p, 1 + k], float64."""
    total = x.new_zeros(len(x), weights.shape[-1], dtype=torch.float64)
    every = model.basis.feature_index(torch.arange(model.num_tail_groups, device=x.device))
    used = weights.any(-1)[every].view(model.basis.group_size, -1).any(0)
    for groups in model.tail_blocks(used):
        total += (model.tail_features(x, head, groups) @ weights[model.basis.feature_index(groups)]).double()
    return total


def _identities(model: QuadruplyStochasticGP) -> Tensor:
    return torch.tensor(identities(model.basis.buffers()), dtype=torch.int64, device=CPU)


class KnownPoints:
    """Kept rows and control points, with options of `QuadruplyStochasticELBO`."""

    def __init__(
        self,
        model: QuadruplyStochasticGP,
        data: TrainingData,
        num_group_samples: int,
        *,
        num_steps_per_batch: int | None,
        num_control_points: int | None,
        is_gaussian: bool,
    ) -> None:
        self.model, self.data, self.num_group_samples = model, data, num_group_samples
        self.num_control_points = control_points(num_control_points, is_gaussian=is_gaussian)
        self.num_steps_per_batch = steps_per_batch(
            model, num_steps_per_batch, num_group_samples, num_control_points=num_control_points
        )
        self._asks_for_points, self._asks_to_keep = num_control_points is not None, num_steps_per_batch is not None
        self._frozen_at: tuple[Part | None, QuadruplyStochasticGP] | None = None

    def with_kept_rows(self, call: Call, run: Run) -> Run:
        kept = run.parts.get("kept")
        if not self._keeps_rows(call, run):
            return _without_kept_rows(run)
        if kept is None and run.parts.get("control") is not None and not torch.is_grad_enabled():
            return run  # an evaluation during training with batches
        has_moved = kept is not None and not _are_rows_of(call.x, kept, run.parts["latent"])
        if has_moved and not self._asks_to_keep:
            # Shuffled data would need a draw in every call.
            return _without_kept_rows(run).having(order={"is_shuffled": torch.tensor(True, device=CPU)})
        if kept is None or has_moved or self._are_due(call, kept) or not self._has_hyperparameters_of(run):
            return self._with_new_rows(call, run)
        return self.followed(run).having(kept={"index": kept["index"], "count": kept["count"] + 1})

    def uses_control_points(self, before: Run) -> bool:
        """For a step without kept rows."""
        if not self.num_control_points or self.model.num_tail_groups <= self.num_group_samples:
            return False
        # An evaluation while training keeps rows starts none.
        return torch.is_grad_enabled() or before.parts.get("kept") is None

    def with_control_points(self, call: Call, run: Run) -> Run:
        """New points are rows of this call."""
        if run.parts.get("control") is not None:
            return self.followed(run)
        if self._asks_for_points and self.num_control_points > call.num_data:
            raise ValueError(
                f"num_control_points must be at most {call.num_data}, the number of data; got {self.num_control_points}."
            )
        x = call.x
        index = draw_set(len(x), min(self.num_control_points, len(x)), call.generator).to(x.device)
        control = {"y": call.target[index].detach().to(x)}
        if isinstance(call.likelihood, FixedNoiseGaussianLikelihood):
            control["noise"] = call.noise(index).detach()
        return self._started(run, x[index].detach()).having(control=control)

    def evaluate(self, run: Run, first: Sample, second: Sample) -> tuple[KnownValues | None, Run]:
        if (part := run.parts.get("latent")) is None:
            return None, run
        values, latent = KnownLatent(**part).evaluate(self._frozen(run), first, second)
        return values, run.having(latent=vars(latent))

    def control_term(self, call: Call, run: Run, known: KnownValues, first: Sample, second: Sample) -> Tensor:
        x, control = run.parts["latent"]["x"], run.parts["control"]
        with torch.no_grad():
            residual = control["y"].to(x) - self.model.prior_mean(x)
            noise = control["noise"].to(x) if "noise" in control else call.likelihood.noise.expand(len(x))
        return control_term(known, first, second, residual, noise.detach())

    def draw_rows(self, call: Call) -> Tensor:
        return draw_set(len(call.x), self.data.num_samples_of(len(call.x)), call.generator).to(call.x.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def followed(self, run: Run) -> Run:
        """The run at current weights."""
        if (part := run.parts.get("latent")) is None:
            return run
        latent = KnownLatent(**part)
        if not latent.follows(self.model):
            return self._started(run, latent.x.to(self.model.basis.like))
        return run.having(latent=vars(latent.caught_up(self._frozen(run))))

    @torch.inference_mode(False)
    def refreshed(self, run: Run) -> Run:
        """The same from all features."""
        run = self.followed(run)
        if (part := run.parts.get("latent")) is None:
            return run
        return run.having(latent=vars(KnownLatent.start(self._frozen(run), part["x"])))

    def resumed(self, run: Run) -> Run:
        """A loaded run, whose basis is that of this process."""
        if (part := run.parts.get("latent")) is None:
            return run
        return run.having(latent={**part, "writes": _identities(self.model)})

    def _keeps_rows(self, call: Call, run: Run) -> bool:
        if self.num_steps_per_batch == 1:
            return False
        is_learned = call.x.requires_grad or any(p.requires_grad for p in self.model.basis.feature_parameters())
        is_whole = len(call.x) == call.num_data
        if self._asks_to_keep and (is_learned or not is_whole):
            reason = (
                "the kernel has hyperparameters to be learned, or the inputs take a gradient: fix them, "
                "model.basis.requires_grad_(False)"
                if is_learned
                else f"only {len(call.x)} of {call.num_data} data were passed: pass all, rows are drawn inside"
            )
            raise ValueError(
                f"num_steps_per_batch={self.num_steps_per_batch}, but {reason}. num_steps_per_batch=1 allows both."
            )
        return is_whole and not is_learned and run.parts.get("order") is None

    def _are_due(self, call: Call, kept: Part) -> bool:
        is_last = int(kept["count"]) >= self.num_steps_per_batch and len(kept["index"]) < len(call.x)
        return is_last and torch.is_grad_enabled()

    def _with_new_rows(self, call: Call, run: Run) -> Run:
        index = self.draw_rows(call)
        kept = {"index": index, "count": torch.tensor(1, device=CPU)}
        return self._started(run, call.x[index]).having(kept=kept, control=None)

    def _started(self, run: Run, x: Tensor) -> Run:
        if run.parts.get("basis") is None or not self._has_hyperparameters_of(run):
            run = run.having(basis={name: value.clone() for name, value in self._hyperparameters().items()})
        return run.having(latent=vars(KnownLatent.start(self._frozen(run), x)))

    def _frozen(self, run: Run) -> QuadruplyStochasticGP:
        part = run.parts.get("basis")
        if self._frozen_at is None or self._frozen_at[0] is not part:
            self._frozen_at = part, freeze(self.model, part or {})
        return self._frozen_at[1]

    def _hyperparameters(self) -> Part:
        own = {id(parameter) for parameter in self.model.basis.feature_parameters()}
        return {name: p.detach() for name, p in self.model.basis.named_parameters() if id(p) in own}

    def _has_hyperparameters_of(self, run: Run) -> bool:
        known = run.parts.get("basis") or {}
        return all(same_tensor(value, known[name]) for name, value in self._hyperparameters().items())


def _without_kept_rows(run: Run) -> Run:
    return run if run.parts.get("kept") is None else run.having(kept=None, latent=None)


def _are_rows_of(x: Tensor, kept: Part, latent: Part) -> bool:
    index = kept["index"]
    return len(x) > int(index.max()) and torch.equal(x[index], latent["x"].to(x))

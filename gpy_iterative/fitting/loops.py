import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpy_iterative.fitting.checkpoint import write_checkpoint
from gpy_iterative.fitting.coordinates import Coordinates, free_parameters
from gpy_iterative.fitting.result import Estimated, FitResult, HistoryRow, estimated, irrelevant_inputs, without_errors
from gpy_iterative.fitting.steps.adam import AdamSteps, HasOptimizer
from gpy_iterative.fitting.steps.levenberg_marquardt import LevenbergMarquardt
from gpy_iterative.fitting.steps.points import Assessment, Point, Step
from gpy_iterative.fitting.stopping import (
    CLEAR,
    LEFT,
    NEAR,
    NOISE,
    FitStatus,
    has_converged,
    has_stalled,
    is_drowned,
    scatter,
)
from gpy_iterative.linear_solvers.solution import SOLVED, SolveStatus
from gpy_iterative.training.progress import Progress, reporting
from gpy_iterative.training.training_system import to_training_mode

logger = logging.getLogger(__name__)

#: Steps of an exact fit, after which another optimiser follows, once they gain little: the first ones may have to multiply
#: variances by 1e10.
FOLLOWED_AFTER = 20


class Loop(ABC):
    """Base of the loops; `history` begins with the rows of a checkpoint."""

    method: str
    steps: int
    preparation = 0.0  # seconds, added to the first row

    def __init__(self, mll: MarginalLogLikelihood, history: list[HistoryRow], max_steps: int, reason: str) -> None:
        self.mll, self.history, self.max_steps, self.reason = mll, history, max_steps, reason

    @abstractmethod
    def advance(self) -> FitStatus | None:
        """Adds a row, and makes a step or returns the final status."""

    def methods(self) -> str:
        """With that of a follower."""
        return self.method

    @abstractmethod
    def state(self) -> dict[str, Any]: ...

    @abstractmethod
    def hyperparameters(self) -> tuple[Estimated, ...]: ...

    def irrelevant(self) -> tuple[str, ...]:
        return ()

    def run(
        self,
        path: Path | None,
        params: Sequence[Any],
        progress: Progress,
        callback: Callable[[HistoryRow], object] | None,
    ) -> FitResult:
        with reporting(progress, "fit", "steps", self.max_steps) as tell:
            status, is_interrupted = None, False
            held = [module for module in self.mll.modules() if not module.training]
            while status is None:
                try:
                    known = len(self.history)
                    self._to_training_mode(held)
                    status = self.advance()
                    if not known:
                        first = self.history[0]
                        self.history[0] = replace(first, seconds=first.seconds + self.preparation)
                    for row in self.history[known:]:
                        logger.info("%s", row)
                        tell(row.step, row.figures())
                        if callback is not None:
                            callback(row)
                    if status is None and path is not None:
                        write_checkpoint(path, self.mll, self.method, self.state(), self.history, params)
                except KeyboardInterrupt:
                    if not self.history:
                        raise
                    status, is_interrupted = FitStatus.BUDGET, True
            self._to_training_mode(held)
        return FitResult(
            status=status,
            steps=self.steps,
            history=tuple(self.history),
            hyperparameters=self.hyperparameters(),
            irrelevant=self.irrelevant(),
            method=self.methods(),
            reason=self.reason,
            seconds=sum(row.seconds for row in self.history),
            is_interrupted=is_interrupted,
        )

    def _to_training_mode(self, held: Sequence[torch.nn.Module]) -> None:
        """After callbacks that predict; `held` modules stay in evaluation mode."""
        to_training_mode(self.mll, self.mll.model, self.mll.likelihood)
        for module in held:
            module.eval()


class CurvatureLoop(Loop):
    """Steps with a curvature.

    Along curved valleys average information is far from the curvature, and steps gain little: `follower` makes an optimiser
    that measures it.
    """

    _saved = ("steps", "_has_raised", "_has_redrawn", "_has_shortened", "_lefts", "_seen", "_best")

    def __init__(
        self,
        optimiser: LevenbergMarquardt,
        history: list[HistoryRow],
        max_steps: int,
        reason: str = "",
        follower: Callable[[], LevenbergMarquardt] | None = None,
    ) -> None:
        super().__init__(optimiser.mll, history, max_steps, reason)
        self.method = optimiser.method
        self._optimiser, self._follower = optimiser, follower
        self.steps, self._has_raised, self._has_redrawn, self._has_shortened = 0, False, False, False
        self._lefts: list[float] = []
        self._seen: list[bool] = []
        self._best: tuple[float, float, float, Tensor] | None = None  # nats left, value, error, position
        self._last: Step | None = None
        self._assessed: Assessment | None = None

    def advance(self) -> FitStatus | None:
        is_last = self.steps >= self.max_steps
        found, is_new = self._assess(is_last=is_last)
        if len(self.history) == 1 and not is_last and self._optimiser.reset_lengthscales(is_start=True):
            return self._start_again()
        limit = _noise_limit(found)
        is_converged = has_converged(found.left, found.noise) and not found.curvature.is_rough
        if is_converged:
            is_settled = found.noise <= limit or self._has_raised
            if is_settled or not self._optimiser.raise_probes():
                return None if not is_last and self._shortens() else self._ended(found, limit)
            self._has_raised = self._has_redrawn = True
            self._last = self._best = None
            return None
        if is_drowned(self._lefts, self._seen, limit, found.noise):
            if self._best is not None and not torch.equal(self._best[-1], self._optimiser.point.position):
                self._optimiser.go_to(self._best[-1])
                self._last = None
                found, _ = self._assess()
            if not is_last and (self._redraws(found) or self._shortens()):
                return None
            return self._ended(self._settle(), limit)
        if is_last:
            if is_new:
                self._settle()
            return FitStatus.BUDGET
        made = self._optimiser.step()
        if made is None:  # nothing changed
            return None if self._shortens() else self._ended(self._settle(), limit)
        self._last, self._assessed = made, None
        self.steps += 1
        if self.steps >= FOLLOWED_AFTER and not len(found.samples) and made.gained < NEAR:
            self._follow()
        return None

    def methods(self) -> str:
        last = self._optimiser.method
        return self.method if last == self.method else f"{self.method}, then {last}"

    def _follow(self) -> None:
        if self._follower is not None:
            self._optimiser, self._follower = self._follower(), None
            self._lefts, self._seen, self._best = [], [], None

    def _shortens(self) -> bool:
        """Looks once for lengthscales that hide a gain."""
        if self._has_shortened:
            return False
        self._has_shortened = self._optimiser.shorten_lengthscales() or self._optimiser.reset_lengthscales()
        if self._has_shortened:
            self._start_again()
        return self._has_shortened

    def _redraws(self, found: Assessment) -> bool:
        """Draws probes once for where the steps have led: those of the start may have far more noise there."""
        if not self._has_redrawn and len(found.samples) and self._optimiser.redraw_probes():
            self._has_redrawn = True
            self._start_again()
            return True
        return False

    def _start_again(self) -> None:
        self._lefts, self._seen = [], []
        self._last = self._best = self._assessed = None

    def _ended(self, found: Assessment, limit: float) -> FitStatus:
        """Far from the optimum something other than noise hides a gain."""
        if found.left - CLEAR * found.noise > NEAR * limit:
            self._assessed = None  # no standard errors away from an optimum
            return FitStatus.STAGNATED
        if found.held.any():
            return FitStatus.BOUND
        is_optimum = has_converged(found.left, found.noise) and found.noise <= limit
        return FitStatus.CONVERGED if is_optimum else FitStatus.NOISE

    def _assess(self, *, is_last: bool = False) -> tuple[Assessment, bool]:
        """Adds a row; also whether the curvature is this point's: far from the end the last point needs none of its own."""
        start, point = time.perf_counter(), self._optimiser.point
        found = self._optimiser.estimate() if is_last else None
        is_new = found is None or found.left - CLEAR * found.noise < NEAR * _noise_limit(found)
        if is_new:
            found = self._optimiser.assess()
        evaluated = point.epochs if self._last is None else self._last.epochs
        self._assessed = found
        if self._is_best(point, found):
            self._best = found.left, point.value, point.error, point.position
        self._lefts.append(found.left)
        self._seen.append(self._last is None or _is_visible(self._last, found))
        self.history.append(self._row(point, found, found.curvature.epochs + evaluated, time.perf_counter() - start))
        return found, is_new

    def _is_best(self, point: Point, found: Assessment) -> bool:
        """By its value where that differs clearly: what seems left is little on a plateau and varies along valleys."""
        if self._best is None:
            return True
        left, value, error, _ = self._best
        gain = point.value - value
        if abs(gain) > LEFT + CLEAR * math.hypot(point.error, error):
            return gain > 0
        return found.left < left

    def _settle(self) -> Assessment:
        start, known = time.perf_counter(), self._assessed  # what the last row tells
        self._assessed = None  # Ctrl-C may come between
        found, last = self._optimiser.settle(), self.history[-1]
        if found is not known:
            epochs, seconds = found.curvature.epochs + (last.epochs or 0.0), last.seconds + time.perf_counter() - start
            left, noise = found.expected()
            self.history[-1] = replace(last, left_to_gain=left, noise=noise, epochs=epochs, seconds=seconds)
        self._assessed = found
        return found

    def _row(self, point: Point, found: Assessment, epochs: float, seconds: float) -> HistoryRow:
        last, (left, noise) = self._last, found.expected()
        return HistoryRow(
            step=self.steps,
            value=point.per_datum[0],
            value_sem=point.per_datum[1],
            left_to_gain=left,
            noise=noise,
            step_length=0.0 if last is None else last.length,
            epochs=epochs,
            seconds=seconds + (0.0 if last is None else last.seconds),
        )

    def state(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self._saved}
        last = None if self._last is None else astuple(self._last)
        return {**own, "last": last, "is_followed": self._follower is None, "optimiser": self._optimiser.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["is_followed"]:
            self._follow()
        for name in self._saved:
            setattr(self, name, state[name])
        self._last = None if state["last"] is None else Step(*state["last"])
        self._optimiser.load_state(state["optimiser"])

    def hyperparameters(self) -> tuple[Estimated, ...]:
        coordinates, found = self._optimiser.coordinates, self._assessed
        if found is None or found.curvature.is_rough:
            return without_errors(coordinates)
        return estimated(coordinates, found.curvature.matrix, found.ridge, found.held)

    def irrelevant(self) -> tuple[str, ...]:
        if self._assessed is None or self._assessed.curvature.is_rough:
            return ()
        return irrelevant_inputs(self._optimiser.coordinates, self._assessed.curvature.matrix)


def _is_visible(last: Step, found: Assessment) -> bool:
    """By the values, or by the gradients, whose noise is far smaller."""
    is_seen = last.seen and (last.gained > LEFT or found.noise == 0)
    return is_seen or last.gained > max(LEFT, CLEAR * found.noise)


def _noise_limit(found: Assessment) -> float:
    return NOISE * max(int((~found.held).sum()), 1)


class AdamLoop(Loop):
    method = "adam"

    def __init__(self, optimiser: AdamSteps, history: list[HistoryRow], max_steps: int, reason: str) -> None:
        super().__init__(optimiser.mll, history, max_steps, reason)
        self._optimiser, self.steps, self._length = optimiser, len(history), 0.0

    def methods(self) -> str:
        return "own_optimizer" if isinstance(self.mll, HasOptimizer) else self.method

    def advance(self) -> FitStatus | None:
        status, start = FitStatus.BUDGET, time.perf_counter()
        if self.steps < self.max_steps:
            value, sem, length = self._optimiser.step()
            self._add(value, sem, start)
            self.steps, self._length = self.steps + 1, length
            status, start = self._status(sem), time.perf_counter()
        if status is not None:
            try:
                self._add(*self._optimiser.value(), start)
            except (NanError, NotPSDError) as error:
                logger.warning("the last hyperparameters have no value: %s", error)
                return FitStatus.STAGNATED
        return status

    def _add(self, value: float, sem: float, start: float) -> None:
        epochs, seconds = getattr(self.mll.report, "epochs", None), time.perf_counter() - start
        self.history.append(HistoryRow(self.steps, value, sem, None, None, self._length, epochs, seconds))

    def _status(self, sem: float) -> FitStatus | None:
        if self._optimiser.is_sampled:
            return None
        values, least = [row.value for row in self.history], LEFT / self.mll.model.train_targets.numel()
        if has_stalled(values, least):
            if any(each.at_bound for each in self.hyperparameters()):
                return FitStatus.BOUND
            if getattr(self.mll.report, "status", SolveStatus.CONVERGED) not in SOLVED:
                return FitStatus.STAGNATED
            is_noisy = scatter(values) > least if math.isnan(sem) else sem > 0
            return FitStatus.NOISE if is_noisy else FitStatus.CONVERGED
        return None

    def state(self) -> dict[str, Any]:
        return {"length": self._length, **self._optimiser.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._optimiser.load_state(state)
        self._length = state["length"]

    def hyperparameters(self) -> tuple[Estimated, ...]:
        weights = {*self.mll.variational_parameters(), *self.mll.parameters(recurse=False)}
        if all(parameter in weights for *_, parameter, _ in free_parameters(self.mll)):
            return ()
        return without_errors(Coordinates(self.mll, excluded=weights))

"""Levenberg-Marquardt steps to the optimum of a value with a curvature.

Coordinates are clipped separately: a lengthscale that goes to infinity must not slow the others.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, ClassVar

import torch
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpy_iterative.checks import check_params
from gpy_iterative.errors import held_warnings, warn
from gpy_iterative.fitting.coordinates import Coordinates, copied, restore
from gpy_iterative.fitting.prior_support import is_in_supports
from gpy_iterative.fitting.steps.curvature import Curvature
from gpy_iterative.fitting.steps.points import Assessment, Point, Secant, Step
from gpy_iterative.fitting.stopping import NEAR
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.training_system import to_training_mode

logger = logging.getLogger(__name__)

#: Largest move of a coordinate without units.
RADIUS = 2.0
#: Of a coordinate with units, relative to its value. A move by the whole value would end at zero: a factor's covariances
#: are stationary there, so a fit whose factors are all clipped to zero ends at this saddle.
RELATIVE_RADIUS = 0.9
#: For undetermined coordinates, per datum; with units relative to the diagonal.
RIDGE = 1e-6
#: Relative to the diagonal of A: largest at first, least after a poor step.
FIRST_DAMPING, POOR_DAMPING = 1.0, 1e-2
#: Gained part of the prediction.
LEAST_GAIN, GOOD_GAIN, VERY_GOOD_GAIN = 0.1, 0.5, 0.75
#: Standard errors of a predicted gain that values show.
VISIBLE = 2.0
MAX_TRIALS = 8


class LevenbergMarquardt(ABC):
    """Base of the optimisers, which differ in their curvature. ValueError without a free parameter."""

    method: ClassVar[str]
    knows_curvature: ClassVar[bool]  # else A may vanish near zero factors
    _failed: ClassVar[tuple[SolveStatus, ...]]  # after these, a point is unusable

    def __init__(self, mll: Any, params: Sequence[Any]) -> None:
        check_params(params)
        self.coordinates = Coordinates(mll)
        self.mll = mll
        self._params = tuple(params)
        self._damping = FIRST_DAMPING
        self._point: Point | None = None
        self._assessment: Assessment | None = None
        self._last: Secant | None = None
        self._is_inside = False
        to_training_mode(mll, mll.model, mll.likelihood)

    @abstractmethod
    def _evaluated(self) -> Point: ...

    @abstractmethod
    def _curvature(self, point: Point) -> Curvature: ...

    def _noise(self, point: Point, left: float) -> Tensor | None:
        """Samples [k, p] of the gradient's noise; None for an exact one."""
        return None

    def raise_probes(self) -> bool:
        """Takes more probes; False, without changes, where that is not possible."""
        return False

    def redraw_probes(self) -> bool:
        """Draws probes and preconditioner for this point; False, without changes, if that hardly lowers the noise."""
        return False

    def shorten_lengthscales(self) -> bool:
        """Goes on from large lengthscales that hide a gain; False, without changes, if there are none."""
        return False

    def reset_lengthscales(self, *, is_start: bool = False) -> bool:
        """Goes on from typical lengthscales where they have no effect; False, without changes, if that gains nothing."""
        return False

    @property
    def point(self) -> Point:
        """The current point; the first is moved inside its bounds."""
        if self._point is None:
            before = copied(self.coordinates.parameters)
            try:
                if not self._is_inside:
                    self.coordinates.enter_bounds()
                self._point, self._is_inside = self._evaluated(), True
            except BaseException:
                restore(self.coordinates.parameters, before)
                raise
        return self._point

    def assess(self) -> Assessment:
        """Curvature and nats left to gain."""
        if self._assessment is None:
            self._assessment = self._assessed(self.point)
        return self._assessment

    def estimate(self) -> Assessment | None:
        """Nats left to gain without a new curvature; None if that would save nothing."""
        return None

    def settle(self) -> Assessment:
        """`assess()` by a curvature that gives standard errors."""
        return self.assess()

    def step(self) -> Step | None:
        """One step; None, with nothing changed, if no step gains.

        Raises NonFiniteError, NotPositiveDefiniteError: at the first point. Later failing steps are undone.
        """
        point, found = self.point, self.assess()
        undo = self._undo_to_here()
        try:
            return self._stepped(point, found, undo)
        except BaseException:  # also Ctrl-C
            undo()
            raise

    def _stepped(self, point: Point, found: Assessment, undo: Callable[[], None]) -> Step | None:
        start, epochs, matrix = time.perf_counter(), 0.0, found.matrix
        if self._last is None:
            # Far from the optimum A does not describe the value: undamped first steps lead to other optima.
            self._damping = min(self._damping, found.left / point.num_data)
        else:
            matrix = self._last.seen_in(matrix, is_near=found.left < NEAR)
        for trial in range(1, MAX_TRIALS + 1):
            move = self._move(point, found, matrix)
            predicted = float(found.gradient @ move - 0.5 * move @ matrix @ move)
            with held_warnings() as held:
                reached = self._tried(point.position + move) if predicted > 0 else None
            if reached is not None:
                epochs += reached.epochs
                gained, least, seen = _gain(point, found, reached, move, predicted)
                logger.debug("trial %d: predicted %.4g, gained %.4g (%s)", trial, predicted, gained, seen)
                if gained > least:
                    part, moved = gained / predicted, reached.position - point.position
                    self._accept(reached, held, Secant(moved, point.gradient - reached.gradient, part < GOOD_GAIN))
                    self._damp(part, is_first=trial == 1, is_exact=not len(found.samples))
                    length = float(moved.abs().max())
                    return Step(length, predicted, gained, seen, trial, epochs, time.perf_counter() - start)
            self._damping = max(10 * self._damping, POOR_DAMPING)
            undo()
        return None

    def _damp(self, part: float, *, is_first: bool, is_exact: bool) -> None:
        if part > VERY_GOOD_GAIN and is_first:
            self._damping /= 10
        elif part > GOOD_GAIN:
            self._damping /= 5
        # With probes the secant is enough: damping would stop moves along ridges of A for many steps.
        elif is_exact:
            self._damping = max(2 * self._damping, POOR_DAMPING)

    def _accept(self, reached: Point, held: Sequence[tuple[str, type[Warning]]], last: Secant | None) -> None:
        for message, category in held:
            warn(message, category)
        self._point, self._assessment, self._last = reached, None, last

    def go_to(self, position: Tensor) -> None:
        self.coordinates.write(position)
        self._point = self._assessment = self._last = None

    def state(self) -> dict[str, Any]:
        """State for an exact resume, without parameters."""
        last = None if self._last is None else astuple(self._last)
        return {"damping": self._damping, "last": last, "mll": self.point.before}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, without changes, for another mll."""
        self.mll.load_training_state(state["mll"])
        self._damping = state["damping"]
        self._last = None if state["last"] is None else Secant(*state["last"])
        self._point = self._assessment = None
        self._is_inside = True

    def _assessed(self, point: Point) -> Assessment:
        return self._assessed_by(self._curvature(point), point)

    def _assessed_by(self, curvature: Curvature, point: Point, samples: Tensor | None = None) -> Assessment:
        """By known samples of the noise, or by new ones."""
        gradient = point.gradient + curvature.correction
        is_lowest, is_highest = self.coordinates.at_bounds(point.position)
        held = (is_lowest & (gradient < 0)) | (is_highest & (gradient > 0))
        diagonal = curvature.matrix.diagonal()
        # The curvature gives coordinates with units a scale.
        has_scale = self.coordinates.has_units & (diagonal > 0)
        scale = torch.where(has_scale, diagonal, point.num_data)
        # With units: by its value, or its standard error if that is larger. A curvature per datum would not do: a task's
        # covariances depend on few degrees of freedom, however many data there are.
        radius = torch.where(has_scale, (RELATIVE_RADIUS * point.position.abs()).maximum(scale.rsqrt()), RADIUS)
        # The value is quadratic in parameters of the mean.
        radius = torch.where(curvature.linear, torch.inf, radius)
        no_samples = gradient.new_zeros(0, len(gradient))
        found = Assessment(curvature, gradient, held, 0.0, 0.0, no_samples, RIDGE * scale, radius)
        left = found.energy(gradient.unsqueeze(0))
        samples = self._noise(point, left) if samples is None else samples
        if samples is None:
            return replace(found, left=left)
        return replace(found, left=left, samples=samples, noise=found.energy(samples))

    def _move(self, point: Point, found: Assessment, matrix: Tensor) -> Tensor:
        free = ~found.held
        # A counts what the data's solve sees, which may be far less than the curvature of a weak component. At a damping of
        # one, the gradient alone then moves no coordinate beyond its radius.
        diagonal = found.curvature.matrix.diagonal().maximum(found.gradient.abs() / self._reach(point, found))
        matrix = matrix + self._damping * torch.diag(diagonal)
        move = torch.zeros_like(point.position)
        move[free] = torch.linalg.solve(matrix[free][:, free], found.gradient[free])
        move = move.maximum(-found.radius).minimum(found.radius)
        return (point.position + move).clamp(self.coordinates.lower, self.coordinates.upper) - point.position

    def _reach(self, point: Point, found: Assessment) -> Tensor:
        """The radius; for factors at most their values. Covariances are quadratic in a factor, so A vanishes near zero."""
        if self.knows_curvature:
            return found.radius
        values = RELATIVE_RADIUS * point.position.abs()
        is_factor = self.coordinates.has_units & ~found.curvature.linear & (values > 0)
        return torch.where(is_factor, values.minimum(found.radius), found.radius)

    def _tried(self, position: Tensor) -> Point | None:
        self.coordinates.write(position)
        if not is_in_supports(self.mll.model):
            return None
        try:
            point = self._evaluated()
        except (NanError, NotPSDError):
            return None
        return None if point.status in self._failed else point

    def _undo_to_here(self) -> Callable[[], None]:
        mll, parameters = self.mll, self.coordinates.parameters
        before, state, report = copied(parameters), mll.training_state(), mll.report
        warned_of = set(mll.warned_of)

        def undo() -> None:
            self.mll = mll
            restore(parameters, before)
            mll.load_training_state(state)
            mll.report = report
            mll.warned_of.intersection_update(warned_of)  # variants of an mll share it

        return undo


def _gain(point: Point, found: Assessment, reached: Point, move: Tensor, predicted: float) -> tuple[float, float, bool]:
    """Gain of a step, the least gain to keep it, and whether the two values show it.

    Frozen probes make noise cancel in differences of values. If noise hides the prediction, the less noisy gradients at
    both ends give the gain, and their noise lowers the least gain; a loss that the values show remains a loss.
    """
    noise, gained, error = found.error_along(move), reached.value - point.value, math.hypot(point.error, reached.error)
    if predicted > VISIBLE * math.hypot(error, noise) or gained < -VISIBLE * error:
        return gained, LEAST_GAIN * predicted, True
    by_gradients = 0.5 * float((point.gradient + reached.gradient) @ move)
    return by_gradients, LEAST_GAIN * predicted - VISIBLE * noise, False

"""Levenberg-Marquardt steps for exact values whose curvature is unknown.

Differences of gradients give it at the first point; then it follows the steps (BFGS; Nocedal and Wright 2006, "Numerical
optimization", section 6.1). Directions that no step took are unknown to it, so central differences judge the end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gpy_iterative.errors import held_warnings
from gpy_iterative.fitting.steps.curvature import Curvature
from gpy_iterative.fitting.steps.levenberg_marquardt import RADIUS, LevenbergMarquardt
from gpy_iterative.fitting.steps.points import Assessment, Point, Secant, Step, with_change
from gpy_iterative.fitting.stopping import has_converged
from gpy_iterative.linear_solvers.solution import SOLVED, SolveStatus
from gpy_iterative.training.likelihood_params import likelihood_arguments

#: Moves for differences, in float64 and in float32; with units relative to larger values. A move of more nats (in float32:
#: than the one in float64) may lead past other optima, as of a period.
DIFFERENCE, ROUNDED_DIFFERENCE = 0.01, 0.1
MOST_NATS = 0.05
#: Least part that a shortened move keeps; shortenings before a coordinate counts as undetermined.
SHORTENED, MAX_SHORTENED = 0.1, 20
#: Part of a converged fit's nats below which central differences judge the end.
SURE = 0.4
#: Least curvature along a step, relative to the known one (Powell's damping).
LEAST_CURVATURE = 0.2
#: Of a value, in units of its dtype's.
ROUNDING = 4.0


@runtime_checkable
class HasExactValues(Protocol):
    def has_exact_values(self) -> bool: ...


class QuasiNewton(LevenbergMarquardt):
    """Steps of a marginal log likelihood with exact values and gradients.

    Cost of a step: one gradient; at the first point also one for each of the p coordinates, at each judged end two.
    """

    method = "quasi_newton"
    knows_curvature = True
    _failed = tuple(status for status in SolveStatus if status not in SOLVED)

    def __init__(self, mll: Any, *, params: Sequence[Any] = ()) -> None:
        super().__init__(mll, params)
        self._matrix: Tensor | None = None  # before the last step
        position = self.coordinates.read()
        is_rounded = any(torch.finfo(each.dtype).bits < 64 for each in self.coordinates.parameters)
        difference = ROUNDED_DIFFERENCE if is_rounded else DIFFERENCE
        self._moves = torch.full_like(position, difference)
        self._most_nats = torch.where(self.coordinates.has_units, MOST_NATS, MOST_NATS * (difference / DIFFERENCE) ** 2)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "matrix": self._matrix, "moves": self._moves.clone()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._matrix, self._moves = state["matrix"], state["moves"].clone()

    def _evaluated(self) -> Point:
        mll, model = self.mll, self.mll.model
        before, targets = mll.training_state(), model.train_targets
        value = mll(model(*model.train_inputs), targets, *likelihood_arguments(mll, self._params))
        num_data = targets.numel() // value.numel()
        total = value.sum() * num_data
        report = mll.report
        return Point(
            position=self.coordinates.read(),
            value=float(total.detach()),
            error=ROUNDING * torch.finfo(value.dtype).eps * abs(float(total.detach())),
            gradient=self.coordinates.gradient(total),
            num_data=num_data,
            per_datum=(float(value.detach().mean()), 0.0),
            status=report.status,
            before=before,
            epochs=report.epochs,
        )

    def _assessed(self, point: Point) -> Assessment:
        found = super()._assessed(point)
        return self._judged(point) if has_converged(found.left / SURE, found.noise) else found

    def _judged(self, point: Point) -> Assessment:
        curvature = self._measured(point, both_sides=True)
        self._matrix = curvature.matrix
        return self._assessed_by(curvature, point)

    def settle(self) -> Assessment:
        found = self.assess()
        if found.curvature.is_rough:
            found = self._assessment = self._judged(self.point)
        return found

    def step(self) -> Step | None:
        damping, made = self._damping, super().step()
        if made is None and self.assess().curvature.is_rough:
            self._damping = damping
            self.settle()
            made = super().step()
        return made

    def _curvature(self, point: Point) -> Curvature:
        if self._matrix is None:
            found = self._measured(point, both_sides=False)
        else:
            found = _known(self._matrix if self._last is None else updated(self._matrix, self._last))
        self._matrix = found.matrix
        return found

    def _measured(self, point: Point, *, both_sides: bool) -> Curvature:
        undo, epochs, rows = self._undo_to_here(), 0.0, []
        try:
            with held_warnings():  # of points that no step takes
                for number in range(len(point.position)):
                    row, passes = self._measured_row(point, number, both_sides=both_sides)
                    epochs += passes
                    rows.append(row)
        finally:
            undo()
        matrix = torch.stack(rows)
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        positive = values.abs()
        if both_sides:
            # The end is no optimum where the value grows ever faster: its gain within the radius of a step counts.
            slopes = vectors.mT @ point.gradient
            gains = slopes.abs() * RADIUS + 0.5 * positive * RADIUS**2
            positive = torch.where(values < 0, slopes.square() / (2 * gains), positive)
        return replace(_known((vectors * positive) @ vectors.mT), epochs=epochs, is_rough=not both_sides)

    def _measured_row(self, point: Point, number: int, *, both_sides: bool) -> tuple[Tensor, float]:
        """A row [p] of the curvature, zero where no neighbour can be evaluated, and epochs.

        The length of the move is kept: units are unknown at first, and a far neighbour has another curvature.
        """
        epochs, most_nats, start = 0.0, float(self._most_nats[number]), float(self._moves[number])
        for _ in range(MAX_SHORTENED):
            part, neighbours = SHORTENED, self._neighbours(point.position, number)
            ends = [self._tried(place) for place in (neighbours if both_sides else neighbours[:1])]
            found = [end for end in ends if end is not None]
            epochs += sum(end.epochs for end in found)
            if len(found) == len(ends):
                first, last = [point, *found][-2:]
                move = last.position[number] - first.position[number]
                if move == 0:  # shortened to less than rounding
                    break
                row = (first.gradient - last.gradient) / move
                nats = float(row[number].abs() * move.square())
                if nats <= most_nats:
                    return row, epochs
                part = max(part, math.sqrt(most_nats / nats) / 2)
            self._moves[number] *= part
        self._moves[number] = start
        return torch.zeros_like(point.gradient), epochs

    def _neighbours(self, position: Tensor, number: int) -> list[Tensor]:
        coordinates, place = self.coordinates, position[number]
        scale = place.abs().clamp_min(1.0) if coordinates.has_units[number] else 1.0
        room = (coordinates.upper[number] - coordinates.lower[number]) / 3
        move = torch.zeros_like(position)
        move[number] = (self._moves[number] * scale).minimum(room)
        both = (position + move, position - move)
        return [end for end in both if coordinates.lower[number] <= end[number] <= coordinates.upper[number]]


def _known(matrix: Tensor) -> Curvature:
    nothing = matrix.new_zeros(len(matrix))
    return Curvature(matrix, nothing, nothing.bool(), None, 0.0, is_rough=True)


def updated(matrix: Tensor, step: Secant) -> Tensor:
    """The matrix [p, p] with the curvature that a step saw, and positive eigenvalues."""
    product = matrix @ step.move
    known, seen, change = step.move @ product, step.move @ step.change, step.change
    if known <= 0:  # of undetermined coordinates
        return matrix + torch.outer(change, change) / seen if seen > 0 else matrix
    if seen < LEAST_CURVATURE * known:
        part = (1 - LEAST_CURVATURE) * known / (known - seen)
        change, seen = part * change + (1 - part) * product, LEAST_CURVATURE * known
    return with_change(matrix, step.move, change)

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpy_iterative.errors import held_warnings
from gpy_iterative.exact.base import IterativeMarginalLogLikelihood
from gpy_iterative.fitting.steps.curvature import NOISE_SAMPLES, Curvature, average_information, gradient_noise
from gpy_iterative.fitting.steps.lengthscales import shorter, typical
from gpy_iterative.fitting.steps.levenberg_marquardt import LevenbergMarquardt
from gpy_iterative.fitting.steps.points import Assessment, Point
from gpy_iterative.fitting.steps.refinement import refined
from gpy_iterative.fitting.stopping import CLEAR, LEFT, has_converged
from gpy_iterative.linear_solvers.solution import SolveStatus
from gpy_iterative.training.likelihood_params import likelihood_arguments
from gpy_iterative.training.run import make_generator
from gpy_iterative.training.training_system import num_training_data

#: Nats; few data see little of any lengthscale.
LEAST_GAIN_OF_RESET = 1.0
#: Part of the value's standard error that other probes must leave.
LESS_NOISE = 0.5
#: Nats left, where one noise sample is enough.
FAR = 100.0
#: Of a block [n, probes]; there are twenty at once.
MOST_ENTRIES = 2**25


class AverageInformation(LevenbergMarquardt):
    """Levenberg-Marquardt steps with the average information as curvature.

    Args:
        mll: `HutchinsonMarginalLogLikelihood` or `PathwiseMarginalLogLikelihood` with training data; set to training mode.
        params: as in `mll(model(x), y, *params)`.
        generator: for stochastic solvers; a generator or a seed, None is seed 0.

    Raises:
        TypeError: another marginal log likelihood.
        ValueError: no free parameter.

    To resume, save parameters, the mll's training state and `state()`.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
        >>> optimiser = gpi.fitting.AverageInformation(mll)
        >>> for _ in range(3):
        ...     step = optimiser.step()
        >>> step.trials >= 1
        True
    """

    method = "average_information"
    knows_curvature = False
    _failed = (SolveStatus.DIVERGED, SolveStatus.INDEFINITE)

    def __init__(
        self,
        mll: IterativeMarginalLogLikelihood,
        *,
        params: Sequence[Any] = (),
        generator: torch.Generator | int | None = None,
    ) -> None:
        if not isinstance(mll, IterativeMarginalLogLikelihood):
            raise TypeError(
                "Average information needs HutchinsonMarginalLogLikelihood or PathwiseMarginalLogLikelihood, got "
                f"{type(mll).__name__}: take gpi.fit(mll, method='adam')."
            )
        super().__init__(mll.variant(), params)
        self._given = mll
        self._generator = make_generator(0 if generator is None else generator)
        # The last ones:
        self._known: Curvature | None = None
        self._samples: Tensor | None = None

    def estimate(self) -> Assessment | None:
        """By the curvature and the noise of the point before: without their solve and derivative, half a step."""
        known, point = self._known, self.point
        if known is None or known.solutions is None:
            return None
        self._given.continue_from(self.mll)
        return self._assessed_by(known, point, self._samples)

    def raise_probes(self, factor: int = 4) -> bool:
        """Multiplies the number of probes; False, without changes, beyond `MOST_ENTRIES`."""
        num_probes = factor * self.mll.probes.num_probes
        if num_probes * num_training_data(self.mll.model) > MOST_ENTRIES:
            return False
        self.mll = self.mll.variant(num_probes=num_probes)
        self._point = self._assessment = self._last = None
        return True

    def redraw_probes(self) -> bool:
        least = LESS_NOISE * self.point.error
        redrawn = self.mll.variant(redraws=True)
        return self._goes_on_from(self.point.position, redrawn, lambda reached: reached.error < least)

    def shorten_lengthscales(self) -> bool:
        position = shorter(self.coordinates, self.point, self.assess())
        return position is not None and self._goes_on_from(position, self.mll, self._gains)

    def reset_lengthscales(self, *, is_start: bool = False) -> bool:
        position = typical(self.coordinates, self.point, self.assess(), is_start=is_start)
        if position is None:
            return False
        # Probes and preconditioner of a constant or a diagonal matrix do not suit another one.
        redrawn = self.mll.variant(redraws=True)
        return self._goes_on_from(position, redrawn, partial(self._gains, least=LEAST_GAIN_OF_RESET, clear=CLEAR))

    def _gains(self, reached: Point, least: float = LEFT, clear: float = 0.0) -> bool:
        """Whether the value grows by `least` nats and `clear` of its standard errors."""
        return reached.value >= self.point.value + least + clear * math.hypot(self.point.error, reached.error)

    def _goes_on_from(
        self, position: Tensor, mll: IterativeMarginalLogLikelihood, is_better: Callable[[Point], bool]
    ) -> bool:
        """False, without changes, if the point there is not better."""
        undo, is_accepted = self._undo_to_here(), False
        try:
            self.mll = mll
            with held_warnings() as held:
                reached = self._tried(position.clamp(self.coordinates.lower, self.coordinates.upper))
            if reached is not None and is_better(reached):
                self._accept(reached, held, None)
                is_accepted = True
        finally:
            if not is_accepted:
                undo()
        return is_accepted

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "num_probes": self.mll.probes.num_probes,
            "given_probes": self._given.probes.num_probes,
            "generator": self._generator.get_state(),
            "known": None if self._known is None else astuple(self._known),
            "samples": self._samples,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        saved, given = state["given_probes"], self._given.probes.num_probes
        if saved != given:
            raise ValueError(f"num_probes is {saved} in it and {given} here.")
        before, self.mll = self.mll, self.mll.variant(num_probes=state["num_probes"])
        try:
            super().load_state(state)
        except BaseException:
            self.mll = before
            raise
        self._known = None if state["known"] is None else Curvature(*state["known"])
        self._samples = state["samples"]
        self._generator.set_state(state["generator"])

    def _evaluated(self) -> Point:
        mll, model, coordinates = self.mll, self.mll.model, self.coordinates
        before = mll.training_state()
        prior = model(*model.train_inputs)
        evaluation = mll.evaluate(prior, model.train_targets, *likelihood_arguments(mll, self._params))
        estimate = evaluation.estimate
        total = evaluation.value.sum() * evaluation.num_data
        rounding = evaluation.system.rounding().sum().cpu()
        error = torch.hypot(estimate.value_sem.double().square().sum().sqrt().cpu(), rounding)
        gradient = coordinates.gradient(total, retain_graph=True)
        value_sem = float(estimate.value_sem.mean()) / evaluation.num_data
        return Point(
            position=coordinates.read(),
            value=float(total.detach()),
            error=float(error.nan_to_num(math.inf)),
            gradient=gradient,
            num_data=evaluation.num_data,
            per_datum=(float(evaluation.value.detach().mean()), value_sem),
            status=estimate.status,
            before=before,
            epochs=estimate.stats.epochs,
            evaluation=evaluation,
        )

    def _assessed(self, point: Point) -> Assessment:
        found = super()._assessed(point)
        if not len(found.samples) and has_converged(found.left, found.noise):
            found = self._refined(point, found)
        self._given.continue_from(self.mll)
        no_correction = torch.zeros_like(found.curvature.correction)
        self._known = replace(found.curvature, correction=no_correction, epochs=0.0)
        self._samples = found.samples
        return found

    def _refined(self, point: Point, found: Assessment) -> Assessment:
        """By the exact curvature where nats are left, as the average information may hide them."""
        free, undo = ~found.held, self._undo_to_here()
        try:
            with held_warnings():  # of points that no step takes
                difference = partial(self._difference, point, free)
                block = refined(found.matrix[free][:, free], found.gradient[free], found.radius[free], difference)
        except BaseException:
            self._point = None  # parameters have changed since its graph, from which another call would begin
            raise
        finally:
            undo()
        matrix = found.matrix.masked_scatter(torch.outer(free, free), block)
        found = replace(found, curvature=replace(found.curvature, matrix=matrix - torch.diag(found.ridge)))
        return replace(found, left=found.energy(found.gradient.unsqueeze(0)))

    def _difference(self, point: Point, free: Tensor, move: Tensor) -> tuple[Tensor, Tensor] | None:
        position = point.position.masked_scatter(free, point.position[free] + move)
        reached = self._tried(position.clamp(self.coordinates.lower, self.coordinates.upper))
        if reached is None:
            return None
        return (reached.position - point.position)[free], (point.gradient - reached.gradient)[free]

    def _curvature(self, point: Point) -> Curvature:
        assert point.evaluation is not None
        guess = None if self._known is None else self._known.solutions
        return average_information(
            self.mll, point.evaluation, self.coordinates, generator=self._generator, initial_guess=guess
        )

    def _noise(self, point: Point, left: float) -> Tensor | None:
        assert point.evaluation is not None
        return gradient_noise(point.evaluation, self.coordinates, 1 if left > FAR else NOISE_SAMPLES)

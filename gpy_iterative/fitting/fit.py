"""`gpi.fit`: the loop that trains a marginal log likelihood to its optimum, with a bar, a history and a checkpoint."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpy_iterative.checks import check_count
from gpy_iterative.exact.base import GaussianMarginalLogLikelihood
from gpy_iterative.fitting.adam import AdamSteps, Batches
from gpy_iterative.fitting.average_information import AverageInformation
from gpy_iterative.fitting.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from gpy_iterative.fitting.choice import Choice, Method, choose, system_now
from gpy_iterative.fitting.coordinates import Coordinates
from gpy_iterative.fitting.points import Assessment, Point, Step
from gpy_iterative.fitting.result import Estimated, FitResult, HistoryRow, estimated, irrelevant_inputs, without_errors
from gpy_iterative.fitting.stopping import LEFT, NOISE, FitStatus, has_converged, has_stalled, is_drowned
from gpy_iterative.fitting.subsets import check_subsets, initialize_from_subsets
from gpy_iterative.training.data_advice import warn_of_data, warn_of_inputs
from gpy_iterative.training.progress import Progress, check_progress, reporting
from gpy_iterative.training.run import make_generator

logger = logging.getLogger(__name__)

#: Steps at the most where nothing else is said.
MAX_STEPS = {"average_information": 30, "adam": 300}


@torch.enable_grad()
def fit(
    mll: MarginalLogLikelihood,
    *,
    method: Method = "auto",
    max_steps: int | None = None,
    batches: Batches | None = None,
    params: Sequence[Any] = (),
    start: Literal["current", "subsets"] = "current",
    checkpoint: str | PathLike[str] | None = None,
    progress: Progress = True,
    callback: Callable[[HistoryRow], object] | None = None,
    generator: torch.Generator | int | None = None,
) -> FitResult:
    """Trains model and likelihood, in place, to the optimum of the marginal log likelihood, and stops by itself.

    Args:
        mll: any marginal log likelihood of the package; its model holds the training data.
        method: "average_information" takes steps with the curvature of the log marginal likelihood, some ten of them;
            "adam" is Adam with a decaying rate (quadruply stochastic models: their own optimiser). "auto" is the first for
            `HutchinsonMarginalLogLikelihood` and `PathwiseMarginalLogLikelihood` with at most 60 free hyperparameters, none
            of which belongs to a network or is an inducing point, and else the second; `result.reason` says why.
        max_steps: at the most; None is 30, or 300 of Adam.
        batches: for mini-batches by Adam: pairs (x, y), or row numbers for mlls that take `indices=`; a list or a
            DataLoader. None passes all training data in every step, of which mini-batch methods draw their rows.
        params: the likelihood's own arguments for the training data, as in `mll(model(x), y, *params)`.
        start: "current" is the hyperparameters as they are; "subsets" fits small subsets first, see
            `gpy_iterative.initialize_from_subsets`.
        checkpoint: a file that is written after each step, in one piece. Where it exists, the same call goes on from it, on
            the same trajectory. `batches` go on where their pass was left; those that are shuffled are drawn again.
        progress: True shows a bar of steps; a callable gets every `gpy_iterative.progress.ProgressReport`.
        callback: gets every `HistoryRow`; the model may be one step ahead of it.
        generator: for solvers that draw; a generator or a seed, None is seed 0. Probes come from the mll's own.

    Returns:
        A `FitResult`: status with advice, history, hyperparameters with standard errors. Ctrl-C ends the fit with what the
        last step has reached, and status BUDGET.

    Raises:
        ValueError: an option outside its range, nothing to fit, a checkpoint of another fit, average information for a
            kernel that has none, subsets of a model that is no exact Gaussian process.
        TypeError: average information for an mll that has none; batches or a callback of another type.
        NonFiniteError, NotPositiveDefiniteError: the start cannot be evaluated. Hyperparameters are as they were.

    Warns:
        DataWarning: data whose scale is far from the start's, constant inputs, copies of rows. One sentence for each.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
        >>> result = gpi.fit(mll, progress=False)
        >>> result.status.name
        'CONVERGED'
        >>> result.steps < 15
        True
    """
    if not isinstance(params, tuple | list):
        raise TypeError(
            f"params must be a tuple of the likelihood's arguments, got {type(params).__name__}: add a comma."
        )
    if params and (batches is not None or start == "subsets"):
        raise ValueError("params= belong to all training data: take batches=None and start='current'.")
    choice = choose(mll, method, batches, params)
    steps = MAX_STEPS[choice.method] if max_steps is None else max_steps
    check_count("max_steps", steps)
    check_progress(progress)
    if start not in ("current", "subsets"):
        raise ValueError(f"start must be 'current' or 'subsets', got {start!r}.")
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.is_dir():
        raise ValueError(f"checkpoint={str(path)!r} is a folder: give the name of a file in it.")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be None or callable, got {callback!r}.")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"The folder of checkpoint={str(path)!r} does not exist: make it first.")
    random = torch.Generator().manual_seed(0) if generator is None else make_generator(generator)
    known = None if path is None or not path.exists() else read_checkpoint(path, mll, choice.method)
    if start == "subsets":
        check_subsets(mll.model, mll.likelihood)
    if known is None:
        _warn_of_data(mll, params)
    logger.info("fit by %s: %s", choice.method, choice.reason)
    loop = _loop(mll, choice, known, steps, batches, params, random)
    before, begun = {name: tensor.clone() for name, tensor in mll.state_dict().items()}, time.perf_counter()
    try:
        if known is None and start == "subsets":
            initialize_from_subsets(mll.model, mll.likelihood, generator=random, progress=progress)
            loop.preparation = time.perf_counter() - begun
        return loop.run(path, progress, callback)
    except BaseException:
        if not loop.history:
            mll.load_state_dict(before)
        raise


def _loop(
    mll: Any,
    choice: Choice,
    known: Checkpoint | None,
    steps: int,
    batches: Batches | None,
    params: Sequence[Any],
    random: torch.Generator,
) -> "_Loop":
    """The loop of the chosen method, where a checkpoint left it."""
    history = [] if known is None else known.history
    loop = (
        _Adam(AdamSteps(mll, num_steps=steps, batches=batches, params=params), history, steps, choice.reason)
        if choice.method == "adam"
        else _Information(AverageInformation(mll, params=params, generator=random), history, steps, choice.reason)
    )
    if known is not None:
        try:
            loop.load_state(known.state)  # which checks it
        except ValueError as error:
            raise ValueError(f"checkpoint= belongs to another fit, give another file: {error}") from error
        mll.load_state_dict(known.parameters)
    return loop


def _warn_of_data(mll: Any, params: Sequence[Any]) -> None:
    """Warns of data that the fit cannot do much with from where it starts."""
    if isinstance(mll, GaussianMarginalLogLikelihood):
        warn_of_data(mll.model, mll.likelihood, system_now(mll, params))
    else:
        warn_of_inputs(mll.model)


class _Loop(ABC):
    """Steps until a rule, the number of steps or Ctrl-C ends them; history and checkpoint after each.

    Args:
        mll: that is fitted.
        history: rows of the steps that a checkpoint has made.
        max_steps: of the whole fit.
        reason: for the method.

    Attributes:
        preparation: seconds that the start took, which count in the first row.
    """

    method: ClassVar[str]
    preparation = 0.0

    def __init__(self, mll: MarginalLogLikelihood, history: list[HistoryRow], max_steps: int, reason: str) -> None:
        self.mll, self.history, self.max_steps, self.reason = mll, history, max_steps, reason

    @abstractmethod
    def advance(self) -> FitStatus | None:
        """Adds a row to the history, and makes a step unless the fit ends here with a status."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside parameters and history."""

    @abstractmethod
    def hyperparameters(self) -> tuple[Estimated, ...]:
        """Values and standard errors of now."""

    def irrelevant(self) -> tuple[str, ...]:
        """Names of the lengthscales of inputs that the data do not need."""
        return ()

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many were made."""

    def run(self, path: Path | None, progress: Progress, callback: Callable[[HistoryRow], object] | None) -> FitResult:
        """The whole fit."""
        with reporting(progress, "fit", "steps", self.max_steps) as tell:
            status = None
            while status is None:
                known = len(self.history)
                self.mll.train()  # a callback may have predicted
                try:
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
                        write_checkpoint(path, self.mll, self.method, self.state(), self.history)
                except KeyboardInterrupt:
                    if not self.history:
                        raise
                    status = FitStatus.BUDGET
        return self._result(status)

    def _result(self, status: FitStatus) -> FitResult:
        return FitResult(
            status=status,
            steps=self.steps,
            history=tuple(self.history),
            hyperparameters=self.hyperparameters(),
            irrelevant=self.irrelevant(),
            method=self.method,
            reason=self.reason,
            seconds=sum(row.seconds for row in self.history),
        )


class _Information(_Loop):
    """Average information."""

    method = "average_information"

    def __init__(
        self, optimiser: AverageInformation, history: list[HistoryRow], max_steps: int, reason: str = ""
    ) -> None:
        super().__init__(optimiser.mll, history, max_steps, reason)
        self._optimiser = optimiser
        self._steps, self._has_raised = 0, False
        self._seen: list[bool] = []
        self._best: tuple[float, Tensor] | None = None  # what was left to gain at the best point, and its position
        self._last: Step | None = None
        self._assessed: Assessment | None = None  # of the current point

    @property
    def steps(self) -> int:
        return self._steps

    def advance(self) -> FitStatus | None:
        found = self._assess()
        limit = NOISE * max(int((~found.held).sum()), 1)
        if has_converged(found.left, found.noise):
            is_settled = found.noise <= limit or self._has_raised
            if is_settled or not self._optimiser.raise_probes():
                return _ended(found, found.noise, limit)
            self._has_raised, self._last, self._best = True, None, None
            return None
        if is_drowned([row.left_to_gain or 0.0 for row in self.history], self._seen, limit):
            if self._best is not None and self._best[0] < found.left:
                self._optimiser.go_to(self._best[1])
                self._last = None
                found = self._assess()
            return _ended(found, max(found.left, found.noise), limit)
        if self._steps >= self.max_steps:
            return FitStatus.BUDGET
        self._last, assessed, self._assessed = self._optimiser.step(), self._assessed, None
        if self._last is None:
            self._assessed = assessed
            return FitStatus.STAGNATED
        self._steps += 1
        return None

    def _assess(self) -> Assessment:
        """What is known of the current point, which gets a row."""
        start = time.perf_counter()
        point, found = self._optimiser.point, self._optimiser.assess()
        evaluated = point.epochs if self._last is None else self._last.epochs
        self._assessed = found
        if self._best is None or found.left < self._best[0]:
            self._best = found.left, point.position
        self._seen.append(self._last is None or self._last.seen)
        self.history.append(self._row(point, found, found.curvature.epochs + evaluated, time.perf_counter() - start))
        return found

    def _row(self, point: Point, found: Assessment, epochs: float, seconds: float) -> HistoryRow:
        last = self._last
        return HistoryRow(
            step=self._steps,
            value=float(point.evaluation.value.detach().mean()),
            value_sem=float(point.evaluation.estimate.value_sem.mean()) / point.evaluation.num_data,
            left_to_gain=found.left,
            noise=found.noise,
            step_length=0.0 if last is None else last.length,
            epochs=epochs,
            seconds=seconds + (0.0 if last is None else last.seconds),
        )

    def state(self) -> dict[str, Any]:
        last = None if self._last is None else astuple(self._last)
        own = {
            "steps": self._steps,
            "has_raised": self._has_raised,
            "seen": self._seen,
            "last": last,
            "best": self._best,
        }
        return {**own, **self._optimiser.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what `state()` gave. Raises ValueError, and changes nothing, where it does not fit."""
        self._steps, self._has_raised, self._seen = state["steps"], state["has_raised"], state["seen"]
        self._last = None if state["last"] is None else Step(*state["last"])
        self._best = state["best"]
        self._optimiser.load_state(state)

    def hyperparameters(self) -> tuple[Estimated, ...]:
        coordinates = self._optimiser.coordinates
        if self._assessed is None:
            return without_errors(coordinates)
        return estimated(
            coordinates,
            coordinates.read(),
            self._assessed.curvature.matrix,
            self._assessed.ridge,
            self._assessed.held,
        )

    def irrelevant(self) -> tuple[str, ...]:
        if self._assessed is None:
            return ()
        return irrelevant_inputs(self._optimiser.coordinates, self._assessed.curvature.matrix)


def _ended(found: Assessment, blur: float, limit: float) -> FitStatus:
    """The status of a fit with nothing left to gain that can be seen, but for so many nats of noise."""
    if found.held.any():
        return FitStatus.BOUND
    return FitStatus.CONVERGED if blur <= limit else FitStatus.NOISE


class _Adam(_Loop):
    """Adam, or the method's own optimiser."""

    method = "adam"

    def __init__(self, optimiser: AdamSteps, history: list[HistoryRow], max_steps: int, reason: str) -> None:
        super().__init__(optimiser.mll, history, max_steps, reason)
        self._optimiser = optimiser

    @property
    def steps(self) -> int:
        return len(self.history)

    def advance(self) -> FitStatus | None:
        if self.steps >= self.max_steps:
            return FitStatus.BUDGET
        start = time.perf_counter()
        value, sem, length = self._optimiser.step()
        epochs = getattr(self.mll.report, "epochs", None)
        self.history.append(
            HistoryRow(self.steps + 1, value, sem, None, None, length, epochs, time.perf_counter() - start)
        )
        # Values of mini-batches rise and fall long before the end, and a schedule is made for all of its steps.
        values = [row.value for row in self.history]
        if not self._optimiser.is_sampled and has_stalled(values, LEFT / self.mll.model.train_targets.numel()):
            return FitStatus.NOISE if sem else FitStatus.CONVERGED
        return None

    def state(self) -> dict[str, Any]:
        return self._optimiser.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes what `state()` gave. Raises ValueError, and changes nothing, where it does not fit."""
        self._optimiser.load_state(state)

    def hyperparameters(self) -> tuple[Estimated, ...]:
        coordinates = Coordinates(self.mll)
        return without_errors(coordinates)

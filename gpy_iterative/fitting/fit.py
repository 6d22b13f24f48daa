import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from gpytorch.mlls import MarginalLogLikelihood, SumMarginalLogLikelihood

from gpy_iterative.checks import check_choice, check_count, check_params
from gpy_iterative.errors import CheckpointError
from gpy_iterative.exact.base import GaussianMarginalLogLikelihood
from gpy_iterative.fitting.checkpoint import Checkpoint, check_can_save, read_checkpoint
from gpy_iterative.fitting.choice import Choice, Method, choose, system_now
from gpy_iterative.fitting.loops import AdamLoop, CurvatureLoop, Loop
from gpy_iterative.fitting.result import FitResult, HistoryRow
from gpy_iterative.fitting.steps.adam import AdamSteps, Batches
from gpy_iterative.fitting.steps.average_information import AverageInformation
from gpy_iterative.fitting.steps.quasi_newton import HasExactValues, QuasiNewton
from gpy_iterative.fitting.subsets import check_subsets, initialize_from_subsets
from gpy_iterative.training.data_advice import warn_of_data, warn_of_latent_model, warn_of_mini_batches
from gpy_iterative.training.progress import Progress, check_progress
from gpy_iterative.training.run import Resumable, make_generator
from gpy_iterative.training.training_system import check_hyperparameters

logger = logging.getLogger(__name__)

MAX_STEPS = {"average_information": 40, "quasi_newton": 60, "adam": 300}


@torch.inference_mode(False)
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
    """Trains model and likelihood, in place, to the optimum of the marginal log likelihood.

    Args:
        mll: any marginal log likelihood of the package, with training data in its model.
        method: "average_information" uses the curvature and takes about ten steps; "quasi_newton" learns the curvature of
            exact values; "adam" has a decaying rate (quadruply stochastic models: their own optimiser). "auto" is average
            information for `HutchinsonMarginalLogLikelihood` and `PathwiseMarginalLogLikelihood`, quasi-Newton for
            Laplace's method with a Cholesky factor; Adam for others, for more than 60 free hyperparameters, networks and
            trained inducing points.
        max_steps: None is 40, 60 for quasi-Newton, 300 for Adam.
        batches: mini-batches for Adam: pairs (x, y), or row numbers for mlls with `indices=`; a list or a DataLoader. None
            is all training data; mini-batch methods draw rows from them.
        params: the likelihood's arguments, as in `mll(model(x), y, *params)`.
        start: "current" hyperparameters, or "subsets": see `gpy_iterative.initialize_from_subsets`.
        checkpoint: a file, written after each step. If it exists, the same call resumes exactly; only shuffled `batches`
            are redrawn.
        progress: True shows a bar; a callable gets every `gpy_iterative.progress.ProgressReport`.
        callback: gets every `HistoryRow`; the model may be one step ahead.
        generator: for stochastic solvers; a generator or a seed, None is seed 0. Probes use the mll's own.

    Returns:
        A `FitResult`. Ctrl-C ends the fit after the last step, with status BUDGET.

    Raises:
        ValueError, TypeError: an invalid option, nothing to fit, an mll that the method cannot fit.
        CheckpointError: a checkpoint of another fit.
        OSError: a checkpoint that cannot be written.
        NonFiniteError, NotPositiveDefiniteError: the start cannot be evaluated. Nothing changes.

    Warns:
        DataWarning: data on a very different scale, constant inputs, duplicate rows, equal terms of a kernel.

    Examples:
        >>> model = MyExactGP(train_x, train_y, likelihood)
        >>> mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
        >>> result = gpi.fit(mll, progress=False)
        >>> result.status.name
        'CONVERGED'
        >>> result.steps < 15
        True
    """
    check_params(params)
    if params and (batches is not None or start == "subsets"):
        raise ValueError("params= belong to all training data: take batches=None and start='current'.")
    if not isinstance(mll, Resumable):
        advice = " Fit the members of the sum one by one." if isinstance(mll, SumMarginalLogLikelihood) else ""
        raise TypeError(
            "gpi.fit needs a marginal log likelihood of gpy_iterative such as gpi.mlls.HutchinsonMarginalLogLikelihood, "
            f"got {type(mll).__name__}.{advice}"
        )
    check_hyperparameters(mll.named_parameters())
    # Before the choice, which changes buffers.
    before = {name: tensor.clone() for name, tensor in mll.state_dict().items()}
    modes = [(module, module.training) for module in mll.modules()]
    history: list[HistoryRow] = []
    num_known = 0
    try:
        choice = choose(mll, method, batches, params)
        steps = MAX_STEPS[choice.method] if max_steps is None else max_steps
        check_count("max_steps", steps)
        check_progress(progress)
        check_choice("start", start, ("current", "subsets"))
        if not isinstance(checkpoint, str | PathLike | None):
            raise TypeError(f"checkpoint must be None or the name of a file, got {checkpoint!r}.")
        path = None if checkpoint is None else Path(checkpoint)
        if path is not None and path.is_dir():
            raise ValueError(f"checkpoint={str(path)!r} is a folder: give the name of a file in it.")
        if callback is not None and not callable(callback):
            raise TypeError(f"callback must be None or callable, got {callback!r}.")
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"The folder of checkpoint={str(path)!r} does not exist: make it first.")
        if path is not None:
            check_can_save(path)
        random = make_generator(0 if generator is None else generator)
        known = None if path is None or not path.exists() else read_checkpoint(path, mll, choice.method, params)
        if start == "subsets":
            check_subsets(mll.model, mll.likelihood)
        if known is None:
            _warn_of_data(mll, params)
        else:
            history, num_known = known.history, len(known.history)
            logger.info("continues from %s, after step %d", path, history[-1].step)
        logger.info("fit by %s: %s", choice.method, choice.reason)
        begun = time.perf_counter()
        loop = _loop(mll, choice, known, history, steps, batches, params, random)
        if known is None and start == "subsets":
            initialize_from_subsets(mll.model, mll.likelihood, generator=random, progress=progress)
            loop.preparation = time.perf_counter() - begun
        return loop.run(path, params, progress, callback)
    except BaseException:
        if len(history) == num_known:
            mll.load_state_dict(before, strict=False)  # a kernel may have drawn its frequencies since
            for module, mode in modes:
                module.training = mode
        raise


def _loop(
    mll: Any,
    choice: Choice,
    known: Checkpoint | None,
    history: list[HistoryRow],
    steps: int,
    batches: Batches | None,
    params: Sequence[Any],
    random: torch.Generator,
) -> Loop:
    if choice.method == "adam":
        adam = AdamSteps(mll, num_steps=steps, batches=batches, params=params)
        loop = AdamLoop(adam, history, steps, choice.reason)
    elif choice.method == "quasi_newton":
        loop = CurvatureLoop(QuasiNewton(mll, params=params), history, steps, choice.reason)
    else:
        curved = AverageInformation(mll, params=params, generator=random)
        follower = partial(QuasiNewton, mll, params=params)
        loop = CurvatureLoop(curved, history, steps, choice.reason, follower)
    if known is not None:
        mll.load_state_dict(known.parameters)  # first: it replaces buffers of that state
        try:
            loop.load_state(known.state)
        except ValueError as error:
            raise CheckpointError(f"checkpoint= belongs to another fit, give another file: {error}") from error
    return loop


def _warn_of_data(mll: Any, params: Sequence[Any]) -> None:
    if isinstance(mll, GaussianMarginalLogLikelihood):
        warn_of_data(mll.model, mll.likelihood, system_now(mll, params))
    elif isinstance(mll, HasExactValues):  # Laplace's
        warn_of_latent_model(mll.model)
    else:
        warn_of_mini_batches(mll.model, mll.likelihood)

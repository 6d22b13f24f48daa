"""Posterior functions and `gpi.fit` for BoTorch.

No other module imports BoTorch, which changes settings of linear_operator and GPyTorch.
"""

import copy
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.errors import warn
from gpy_iterative.exact.prediction.sample_paths import SamplePaths
from gpy_iterative.fitting import FitStatus
from gpy_iterative.fitting.fit import fit

try:
    from botorch.exceptions.warnings import OptimizationWarning
    from botorch.models.deterministic import DeterministicModel
    from botorch.models.gpytorch import BatchedMultiOutputGPyTorchModel, GPyTorchModel, MultiTaskGPyTorchModel
    from botorch.optim.core import OptimizationResult, OptimizationStatus
except ImportError as error:
    raise ImportError("gpy_iterative.botorch needs BoTorch: pip install botorch.") from error

__all__ = ["SamplePathModel", "fit_average_information"]


def fit_average_information(
    mll: MarginalLogLikelihood, *, closure: object = None, progress: bool = False, **options: Any
) -> OptimizationResult:
    """`gpi.fit` as a BoTorch optimiser: `fit_gpytorch_mll(mll, optimizer=fit_average_information)`.

    Args:
        mll: of this package, for a BoTorch model.
        closure: None; another raises ValueError, as no closure gives the curvature.
        progress, options: of `gpy_iterative.fit`, as in `optimizer_kwargs={"max_steps": 20}`. SciPy's "options", which
            BoTorch's relevance pursuit passes, raise ValueError.

    Returns:
        BoTorch's result. After an OptimizationWarning (stagnated fit) BoTorch draws new initial hyperparameters.
    """
    if closure is not None:
        raise ValueError("fit_average_information evaluates the mll itself: leave closure= and closure_kwargs= out.")
    if "options" in options:
        raise ValueError(
            "fit_average_information takes no options of SciPy, which BoTorch's relevance pursuit passes: give max_steps "
            "in optimizer_kwargs, and fit a RobustRelevancePursuitSingleTaskGP without optimizer=."
        )
    result = fit(mll, progress=progress, **options)
    if result.status is FitStatus.STAGNATED:
        warn(result.status.advice, OptimizationWarning)
    statuses = {FitStatus.BUDGET: OptimizationStatus.STOPPED, FitStatus.STAGNATED: OptimizationStatus.FAILURE}
    return OptimizationResult(
        step=result.steps,
        fval=-result.history[-1].value,
        status=statuses.get(result.status, OptimizationStatus.SUCCESS),
        runtime=result.seconds,
        message=result.status.advice,
    )


class SamplePathModel(DeterministicModel):
    """Posterior functions as a BoTorch deterministic model, in the units of `model.posterior`.

    For `optimize_posterior_samples`, or as the `samples` of `PathwiseThompsonSampling` with `batch_size` k.

    Args:
        model: such as a SingleTaskGP; its transforms are copied.
        paths: `mll.posterior().sample_paths(k)`.

    Raises:
        TypeError: the model is no exact BoTorch Gaussian process, or multitask.
        ValueError: it is a batch.
    """

    def __init__(self, model: GPyTorchModel, paths: SamplePaths) -> None:
        if not isinstance(model, GPyTorchModel) or not isinstance(model, ExactGP) or not _lists_outputs_first(model):
            raise TypeError(f"SamplePathModel takes a model such as SingleTaskGP, got {type(model).__name__}.")
        if model.batch_shape:
            raise ValueError(f"SamplePathModel takes one model; this is a batch of {tuple(model.batch_shape)}.")
        super().__init__()
        self.paths = paths
        self._num_outputs = model.num_outputs
        # Under BoTorch's names, BoTorch would apply them again.
        self._to_model = copy.deepcopy(getattr(model, "input_transform", None))
        self._from_model = copy.deepcopy(getattr(model, "outcome_transform", None))
        self.eval()

    @property
    def batch_shape(self) -> torch.Size:
        """[k], the number of functions."""
        return torch.Size([self.paths.num_paths])

    def train(self, mode: bool = True) -> "SamplePathModel":
        """Stays in evaluation mode, as transforms adapt in training mode."""
        return super().train(False)

    def forward(self, X: Tensor) -> Tensor:
        """The functions at X, in the units of the model's data.

        Args:
            X: [t, d] or [*b, 1, t, d]; [*b, k, t, d] for separate points, at k times the cost.

        Returns:
            [k, t, m] or [*b, k, t, m] for m outputs, differentiable in X.
        """
        num_paths = self.paths.num_paths
        if X.dim() > 2 and X.shape[-3] not in (1, num_paths):
            raise ValueError(
                f"There are {num_paths} functions: X must have the shape [t, d], [*b, 1, t, d] or [*b, {num_paths}, t, d], "
                f"got {tuple(X.shape)}."
            )
        has_own_points = X.dim() > 2 and X.shape[-3] > 1
        points = X.flatten(-3, -2) if X.dim() > 2 else X  # all functions at all points
        if self._to_model is not None:
            points = self._to_model(points)
        if self._num_outputs > 1:
            values = self.paths(points.unsqueeze(-3)).mT  # [k, *b, t, m]
        else:
            values = self.paths(points).unsqueeze(-1)
        if has_own_points:
            values = values.unflatten(-2, X.shape[-3:-1]).diagonal(dim1=0, dim2=-3).movedim(-1, -3)
        else:
            values = values.movedim(0, -3)
        return values if self._from_model is None else self._from_model.untransform(values, X=X)[0]


def _lists_outputs_first(model: GPyTorchModel) -> bool:
    has_one = model.num_outputs == 1 and not isinstance(model, MultiTaskGPyTorchModel)
    return has_one or isinstance(model, BatchedMultiOutputGPyTorchModel)

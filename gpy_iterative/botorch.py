"""Posterior functions and `gpi.fit` in BoTorch: the only module that imports it, and that nothing else imports.

BoTorch is an extra. Its import changes process-wide settings of linear_operator and GPyTorch, which is why
`import gpy_iterative` does without it: write `from gpy_iterative.botorch import SamplePathModel`.
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
    raise ImportError("gpy_iterative.botorch needs BoTorch: pip install 'gpy_iterative[botorch]'.") from error

__all__ = ["SamplePathModel", "fit_average_information"]


def fit_average_information(
    mll: MarginalLogLikelihood, *, closure: object = None, progress: bool = False, **options: Any
) -> OptimizationResult:
    """`gpi.fit` as an optimiser of BoTorch: `fit_gpytorch_mll(mll, optimizer=fit_average_information)`.

    Args:
        mll: one of this package, of a BoTorch model.
        closure: None. The steps need the curvature, which no closure gives.
        progress: whether a bar is shown.
        options: of `gpy_iterative.fit`, by BoTorch's `optimizer_kwargs=`.

    Returns:
        BoTorch's result; `message` is the advice of the fit's status. A fit that stagnates warns with an
        OptimizationWarning, after which BoTorch starts again from hyperparameters drawn from their priors.

    Raises:
        ValueError: a closure was given.
        Others: as `gpy_iterative.fit`.
    """
    if closure is not None:
        raise ValueError("fit_average_information evaluates the mll itself: leave closure= and closure_kwargs= out.")
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
    """Posterior functions as one of BoTorch's deterministic models, in the units of `model.posterior`.

    It does what `botorch.sampling.pathwise.get_matheron_path_model(model, sample_shape=torch.Size([k]))` does, without a
    dense factor of the training data: `optimize_posterior_samples(paths, bounds)` takes it, and
    `PathwiseThompsonSampling(model)` when it is set as its `samples`, with `batch_size` k.

    Args:
        model: the model that the paths come from, a SingleTaskGP for one. Its input transform is applied to what the
            functions are asked for, and its outcome transform is undone; both as they are now.
        paths: `mll.posterior().sample_paths(k)`.

    Raises:
        TypeError: no BoTorch model of exact Gaussian processes, or one of several tasks.
        ValueError: a batch of models.
    """

    def __init__(self, model: GPyTorchModel, paths: SamplePaths) -> None:
        if not isinstance(model, GPyTorchModel) or not isinstance(model, ExactGP) or not _lists_outputs_first(model):
            raise TypeError(f"SamplePathModel takes a model such as SingleTaskGP, got {type(model).__name__}.")
        if model.batch_shape:
            raise ValueError(f"SamplePathModel takes one model; this is a batch of {tuple(model.batch_shape)}.")
        super().__init__()
        self.paths = paths
        self._num_outputs = model.num_outputs
        # Other names than BoTorch's own, by which it would apply them once more.
        self._to_model = copy.deepcopy(getattr(model, "input_transform", None))
        self._from_model = copy.deepcopy(getattr(model, "outcome_transform", None))
        self.eval()

    @property
    def batch_shape(self) -> torch.Size:
        """[k], the number of functions."""
        return torch.Size([self.paths.num_paths])

    def train(self, mode: bool = True) -> "SamplePathModel":
        """Stays in evaluation mode: in training transforms learn from what they see."""
        return super().train(False)

    def forward(self, X: Tensor) -> Tensor:
        """The functions at X, in the units of the data that the model was given.

        Args:
            X: [t, d] or [*b, 1, t, d] for all functions at the same points, [*b, k, t, d] for each at its own.

        Returns:
            [k, t, m] or [*b, k, t, m] for m outputs. Differentiable with respect to X.

        Own points cost as much as k times the points of one function: the kernel is evaluated once for each.
        """
        num_paths = self.paths.num_paths
        if X.dim() > 2 and X.shape[-3] not in (1, num_paths):
            raise ValueError(
                f"There are {num_paths} functions: X must have the shape [t, d], [*b, 1, t, d] or [*b, {num_paths}, t, d], "
                f"got {tuple(X.shape)}."
            )
        has_own_points = X.dim() > 2 and X.shape[-3] > 1
        points = X.squeeze(-3) if X.dim() > 2 and not has_own_points else X
        if self._to_model is not None:
            points = self._to_model(points)
        if self._num_outputs > 1:
            values = self.paths(points.unsqueeze(-3)).mT  # [k, *b, t, m]
        else:
            values = self.paths(points).unsqueeze(-1)
        if has_own_points:
            values = values.diagonal(dim1=0, dim2=-3).movedim(-1, -3)
        else:
            values = values.movedim(0, -3)
        return values if self._from_model is None else self._from_model.untransform(values, X=X)[0]


def _lists_outputs_first(model: GPyTorchModel) -> bool:
    """Whether outputs are a batch dimension; tasks are a column of the inputs."""
    has_one = model.num_outputs == 1 and not isinstance(model, MultiTaskGPyTorchModel)
    return has_one or isinstance(model, BatchedMultiOutputGPyTorchModel)

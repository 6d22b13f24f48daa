"""Whether an optimiser searches along lines, which needs a value and a gradient that belong together."""

import torch
from gpytorch.models import ExactGP
from torch import Tensor

#: Angle within which a step goes straight back, in square roots of the rounding unit: 7e-8 in float64, 2e-3 in float32.
ANGLE = 5.0
#: Steps straight back before an optimiser is known to search: one may be chance, with two or three hyperparameters.
SIGHTINGS = 2

ADVICE = (
    "The hyperparameters move as in a line search (L-BFGS), which takes value and gradient for those of one smooth "
    "function. Here they are separate estimates: the search stops where these disagree, and reports success or failure as "
    "it happens. Use Adam (in BoTorch fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_torch, ...)) or, while memory "
    "allows, HutchinsonMarginalLogLikelihood(..., solver=Cholesky()), whose value and gradient are exact."
)


class LineSearchWatch:
    """Watches a model's hyperparameters from call to call.

    A search that has gone too far comes back on the line that it went; steps of Adam, momentum or plain gradient descent do
    not, but for rounding and chance.
    """

    def __init__(self) -> None:
        self._point: Tensor | None = None
        self._step: Tensor | None = None
        self._sightings = 0

    @torch.no_grad()
    def sees_search(self, model: ExactGP) -> bool:
        """Whether the steps up to now, the one to the model's present hyperparameters included, are those of a search."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            return False
        point = torch.cat([parameter.reshape(-1).double() for parameter in parameters])
        before, self._point = self._point, point
        step = None if before is None or before.shape != point.shape else point - before.to(point.device)
        last, self._step = self._step, step
        if step is not None and last is not None and _goes_back(step, last.to(step.device), parameters[0].dtype):
            self._sightings += 1
        return self._sightings >= SIGHTINGS


def _goes_back(step: Tensor, last: Tensor, dtype: torch.dtype) -> bool:
    if step.shape != last.shape or int(((step != 0) | (last != 0)).sum()) < 2:  # one hyperparameter has one line only
        return False
    first, second = step / step.norm(), last / last.norm()  # NaN, and no answer, where nothing has moved
    return bool((first + second).norm() < ANGLE * torch.finfo(dtype).eps ** 0.5)

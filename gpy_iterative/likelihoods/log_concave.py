"""Which likelihoods are log-concave in the latent value, and which targets they know."""

from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood, Likelihood, PoissonLikelihood
from torch import Tensor

from gpy_iterative.likelihoods.bernoulli import LogitBernoulliLikelihood

_BINARY = (BernoulliLikelihood, LogitBernoulliLikelihood)
_LOG_CONCAVE = (*_BINARY, LaplaceLikelihood, PoissonLikelihood)


def is_log_concave(likelihood: Likelihood) -> bool:
    """Whether log p(y | f) is known to be concave in f."""
    return isinstance(likelihood, _LOG_CONCAVE)


def check_binary_targets(likelihood: Likelihood, target: Tensor) -> None:
    """Raises ValueError for labels other than 0 and 1 where the likelihood is one of two classes."""
    if not isinstance(likelihood, _BINARY):
        return
    bad = (target != 0) & (target != 1)
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        advice = " For labels -1 and 1 pass (target + 1) / 2." if ((target.abs() == 1) | (target == 0)).all() else ""
        raise ValueError(
            f"{type(likelihood).__name__} has labels 0 and 1, but target{list(index)} is {target[index].item()}.{advice}"
        )

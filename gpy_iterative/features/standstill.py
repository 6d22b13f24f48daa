"""Whether an optimiser moves the hyperparameters while a method's weights or batches stay where they were."""

from collections.abc import Iterable

from torch import Tensor

#: Steps after which an optimiser that does not know the weights is noticed.
STEPS_ALONE = 10


class StandstillWatch:
    """Watches parameters from call to call, by the counts of their changes.

    Args:
        method: the name of what is trained.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self._own: list[int] = []
        self._hyper: list[int] = []
        self._steps = 0

    def sees(self, own: Iterable[Tensor | None], hyperparameters: Iterable[Tensor], trains: bool) -> str | None:
        """Advice after ten steps that moved hyperparameters alone, once a standstill; else None.

        Args:
            own: parameters of the method itself.
            hyperparameters: of the model.
            trains: whether this call draws a batch of its own.
        """
        weights = [p._version for p in own if p is not None and p.requires_grad]
        others = [p._version for p in hyperparameters]
        stands = not trains or (bool(weights) and weights == self._own)
        self._steps = self._steps + 1 if stands and others != self._hyper else 0
        self._own, self._hyper = weights, others
        if self._steps != STEPS_ALONE:
            return None
        reason = (
            f"left the parameters of {self._method} itself where they were: make the optimiser with mll.parameters()."
            if trains
            else f"saw one batch, since {self._method} is in evaluation mode: call mll.train()."
        )
        return f"The last {STEPS_ALONE} steps moved hyperparameters and {reason}"

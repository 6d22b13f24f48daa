"""The tensors that a mini-batch method keeps from step to step: replaced, taken back after a failure, never a model's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpy_iterative.features.minibatch_state import MinibatchState


class MinibatchRun(ExactMarginalLogLikelihood):
    """A marginal log likelihood whose own buffers and parameters are the state of a run, and no hyperparameters.

    They are float64 whatever the model's dtype, and stay out of `state_dict()`: dicts go to and from GPyTorch's own
    classes.
    """

    def __init__(self, likelihood: Likelihood, model: ExactGP, state: MinibatchState) -> None:
        super().__init__(likelihood, model)
        self._state = state

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers and parameters of the mll itself, without those of model and likelihood."""
        yield from self.named_buffers(recurse=False)
        yield from self.named_parameters(recurse=False)

    def _replace(self, name: str, tensor: Tensor) -> None:
        """A new tensor in place of a buffer, or as a parameter's value; never written into the old one."""
        if name in self._buffers:
            self._buffers[name] = tensor
        else:
            self._parameters[name].data = tensor

    @contextmanager
    def _unchanged_by_failure(self, always: bool = False) -> Iterator[None]:
        """What raises inside leaves no trace, nor does anything where `always` is set."""
        tensors = {name: tensor.detach() for name, tensor in self._own_tensors()}
        memento = self._state.memento()
        try:
            yield
        except BaseException:
            always = True
            raise
        finally:
            if always:
                for name, tensor in list(self._own_tensors()):
                    if tensor.data_ptr() != tensors[name].data_ptr():
                        self._replace(name, tensors[name])
                self._state.restore(memento)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MinibatchRun":
        before = {name: tensor.detach() for name, tensor in self._own_tensors()}
        super()._apply(fn, recurse)
        for name, tensor in list(self._own_tensors()):  # float64 whatever the model is converted to
            self._replace(name, before[name].to(tensor.device))
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        return

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        return

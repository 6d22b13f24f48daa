"""What mini-batch learning refuses: kernels without features, and rows that depend on one another."""

from collections.abc import Callable

import gpytorch
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

#: Rows that are evaluated by themselves, and beside others.
FEW_ROWS, MANY_ROWS = 2, 16


#: Parts of the largest entry that rounding may change, in half precision too; batches and chance change more.
SAME_ROWS = 0.01


def check_features(model: gpytorch.models.ExactGP) -> None:
    """Raises ValueError where a layer is known to give a row other features beside other rows, or by chance."""
    for name, module in model.named_modules():
        is_dropout = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (is_dropout or isinstance(module, _BatchNorm | torch.nn.RReLU)):
            raise ValueError(
                f"The layer {name}, a {type(module).__name__} in training mode, gives a row other features in another "
                "batch: then there is no one marginal likelihood. Put it into evaluation mode "
                f"(model.get_submodule({name!r}).eval(), after every model.train()), or take LayerNorm."
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"The layer {name}, a {type(module).__name__} with track_running_stats=False, gives a row other features "
                "in another batch, in evaluation mode too: then there is no one marginal likelihood. Take LayerNorm."
            )


@torch.inference_mode(False)
@torch.no_grad()
def check_rows(model: gpytorch.models.ExactGP, moments: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    """Raises ValueError where the prior at a row depends on the rows beside it, or on chance: by trying.

    Args:
        model: whose buffers stay as they are, as does torch's generator.
        moments: mean [k] and covariance [k, k] at the first k data.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    found = []
    with torch.random.fork_rng(list(devices)):
        for count in (FEW_ROWS, MANY_ROWS, MANY_ROWS):
            try:
                found.append(moments(count))
            finally:
                for buffer, values in before:  # running statistics, vectors of a power iteration
                    if not torch.equal(buffer, values):
                        buffer.copy_(values)
    (mean, covariance), *others = found
    size = len(mean)
    for other_mean, other_covariance in others:
        for ours, theirs in ((mean, other_mean[:size]), (covariance, other_covariance[:size, :size])):
            if (ours - theirs).abs().max() > SAME_ROWS * ours.abs().max():
                raise ValueError(
                    f"The model gives the first {size} data another mean or covariance beside other rows, or when they are "
                    "evaluated again: a layer depends on the batch, or on chance. Then there is no one marginal "
                    "likelihood. Put such layers into evaluation mode after every model.train(), or take others (LayerNorm "
                    "in place of batch normalisation)."
                )

"""A training that several processes share, on one machine or many, and that a restart goes on with.

    torchrun --nproc-per-node 2 examples/several_processes.py

Every process runs the whole script. What makes them share the work is one option, `KernelProducts(process_group="world")`;
the rest is what any script for torchrun has: the same data and the same seeds everywhere, and rank 0 alone prints. When a
process dies, the others end with an error: started again, the script goes on from its last checkpoint.
"""

import argparse
import os
from pathlib import Path

import gpytorch
import torch
import torch.distributed as dist
from torch import Tensor

import gpy_iterative as gpi


class Regression(gpytorch.models.ExactGP):
    """Any GPyTorch model."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=x.shape[-1])
        )

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_data(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Made-up observations: from a generator of its own, so that every process makes the same."""
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(rows, 2, generator=generator) - 2
    y = torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1]) + 0.2 * torch.randn(rows, generator=generator)
    return x.to(device), y.to(device)


def show_row(row: gpi.fitting.HistoryRow) -> None:
    """A line for each step, at once."""
    print(f"step {row}", flush=True)


def main(rows: int, steps: int, checkpoint: Path) -> None:
    """Fits in at most so many steps, from the checkpoint on where there is one, and predicts."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0

    torch.manual_seed(0)  # before the model is built: parameters may start at random
    train_x, train_y = make_data(rows, device)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(train_x, train_y, likelihood).to(device)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(
        likelihood,
        model,
        products=gpi.linear_operators.KernelProducts(process_group="world"),  # the one change
        generator=0,
    )
    # Every process writes the same checkpoint, in one piece, and reads it at a restart: all need access to its folder.
    result = gpi.fit(
        mll, max_steps=steps, checkpoint=checkpoint, progress=False, callback=show_row if is_first else None
    )
    if is_first:
        print(f"{result.status.name}: {result.status.advice}", flush=True)

    posterior = mll.posterior()
    with torch.no_grad():  # by all processes: predictions are products, too
        prediction = likelihood(posterior(train_x[:5] + 0.01))
    if is_first:
        print("predictions", prediction.mean.tolist(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", type=Path, default=Path("several_processes.pt"))
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("this script is started by torchrun: see --help.")
    main(arguments.rows, arguments.steps, arguments.checkpoint)

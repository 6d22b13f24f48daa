"""A million observations of a field over the plane: hyperparameters, predictions with their uncertainty, and a map.

    python examples/million_rows.py                 # 45 minutes to an hour on two cores, 10 GB
    python examples/million_rows.py --rows 20000    # a minute

Replace `observations` by your own data: inputs [n, 2] or [n, 3] and targets [n], about standardised, in float32.
"""

import argparse

import gpytorch
import torch
from torch import Tensor

import gpy_iterative as gpi

LEAST_ROWS = 2000


def observations(rows: int) -> tuple[Tensor, Tensor]:
    """Places in a square of side 4, and the height of a landscape there, seen with noise of variance .01."""
    generator = torch.Generator().manual_seed(0)
    places = 4 * torch.rand(rows, 2, generator=generator)
    waves = 8 * torch.randn(200, 2, generator=generator)
    phases = 6.28 * torch.rand(200, generator=generator)
    height = torch.cat([torch.cos(part @ waves.T + phases).mean(-1) for part in places.split(50_000)])
    return places, 14 * height + 0.1 * torch.randn(rows, generator=generator)


class Landscape(gpytorch.models.ExactGP):
    """Any GPyTorch model with a radial kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=2))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def main() -> None:
    """Fits all rows but 1,000, which it predicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    if rows < LEAST_ROWS:
        parser.error(f"--rows must be {LEAST_ROWS} or more, since 1,000 are predicted: got {rows}.")
    x, y = observations(rows)
    (test_x, train_x), (test_y, train_y) = x.split([1000, rows - 1000]), y.split([1000, rows - 1000])
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Landscape(train_x, train_y, likelihood)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(likelihood, model, generator=0)
    print(gpi.fit(mll, start="subsets", callback=print, progress=False))
    with torch.no_grad():
        prediction = likelihood(mll.posterior()(test_x))
    error = prediction.mean - test_y
    print(f"root mean square error {error.square().mean().sqrt():.3f}, of which noise 0.1")
    print(f"inside of the 95 % interval: {100 * (error.abs() < 1.96 * prediction.stddev).float().mean():.0f} %")


if __name__ == "__main__":
    main()

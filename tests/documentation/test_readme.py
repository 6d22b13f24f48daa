"""The Python code of README.md and of the site's first page runs as it stands."""

import re
from pathlib import Path

import gpytorch
import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


class MyExactGP(gpytorch.models.ExactGP):
    """What the reader has."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_block_trains_and_predicts_with_a_model_of_the_readers(page: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 1, generator=generator)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(120, generator=generator)
    reader = {
        "MyExactGP": MyExactGP,
        "likelihood": gpytorch.likelihoods.GaussianLikelihood(),
        "train_x": x[20:],
        "train_y": y[20:],
        "test_x": x[:20],
    }
    exec(code_blocks(page)[0], reader)
    assert (reader["prediction"].mean - torch.sin(6 * x[:20, 0])).abs().max() < 0.1
    assert reader["paths"](x[:20]).shape == (16, 20)

"""`torch.autocast` rounds products to bfloat16: refused everywhere, but allowed around a network."""

from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.distributions import MultivariateNormal

import gpy_iterative as gpi
from tests.exact.gaussian_models import DeepKernelRegression, regression
from tests.features.feature_models import feature_case, fourier
from tests.laplace.cases import case as laplace_case
from tests.quadruply.quadruply_models import fourier_problem, gaussian_likelihood


def autocast(*, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def exact() -> tuple[gpi.mlls.HutchinsonMarginalLogLikelihood, torch.Tensor]:
    case = regression(kernels.ScaleKernel(kernels.MaternKernel(nu=1.5)))
    return gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0), case.x


def value(mll: gpi.mlls.HutchinsonMarginalLogLikelihood) -> torch.Tensor:
    return mll(mll.model(*mll.model.train_inputs), mll.model.train_targets)


def of_features() -> torch.Tensor:
    case = feature_case(kernels.ScaleKernel(fourier()))
    return value(gpi.mlls.VariationalFeatureMarginalLogLikelihood(case.likelihood, case.model, generator=0))


def of_laplace() -> torch.Tensor:
    problem = laplace_case("logit")
    return value(gpi.mlls.LaplaceMarginalLogLikelihood(problem.likelihood, problem.model))


def of_quadruply() -> torch.Tensor:
    model, x, y = fourier_problem()
    mll = gpi.mlls.QuadruplyStochasticELBO(gaussian_likelihood(0.2), model, num_data=len(x), generator=0)
    return mll(model(x), y)


USES: dict[str, Callable[[], object]] = {
    "value": lambda: value(exact()[0]),
    "features": of_features,
    "laplace": of_laplace,
    "quadruply": of_quadruply,
    "fit": lambda: gpi.fit(exact()[0], progress=False),
    "solve": lambda: gpi.solvers.ConjugateGradients().solve(
        gpi.linear_operators.NoisyLinearOperator(kernels.RBFKernel()(torch.ones(3, 1)), torch.ones(3)), torch.ones(3)
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_is_refused(use: Callable[[], object]) -> None:
    with autocast(), pytest.raises(RuntimeError, match=r"torch\.autocast is on.*\.float\(\)"):
        use()


def test_backward_passes_and_predictions_refuse_it() -> None:
    mll, x = exact()
    loss = -value(mll)
    with autocast(), pytest.raises(RuntimeError, match=r"torch\.autocast is on"):
        loss.backward()
    posterior = mll.posterior()
    for predict in (posterior, posterior.sample_paths(2), mll.model):
        with autocast(), pytest.raises(RuntimeError, match=r"torch\.autocast is on"):
            predict(x[:3] + 0.1)


class AutocastNetwork(DeepKernelRegression):
    """The documented way: the network alone under autocast."""

    is_enabled = True

    def forward(self, x: torch.Tensor) -> MultivariateNormal:
        with autocast(enabled=self.is_enabled):
            features = self.network(x)
        return super(DeepKernelRegression, self).forward(features.float())


def test_a_network_may_have_it() -> None:
    x, y = torch.rand(20, 3), torch.rand(20)
    model = AutocastNetwork(x, y, gpytorch.likelihoods.GaussianLikelihood())
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model, generator=0)
    found = value(mll)
    found.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.network.parameters())
    model.is_enabled = False
    torch.testing.assert_close(found, value(mll), rtol=0.05, atol=0.01)

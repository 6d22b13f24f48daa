"""Kernels with a finite feature map: the features are the kernel's, and plain GPyTorch runs on them."""

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.kernels import feature_map, register_feature_map
from gpy_iterative.spectral.finite import has_feature_map
from tests.exact.gaussian_models import data
from tests.features.feature_models import KERNELS, Quadratic, feature_case, fourier, network

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_features_are_those_of_the_kernel(name: str, dtype: torch.dtype) -> None:
    case = feature_case(KERNELS[name](), n=12, dtype=dtype)
    kernel = case.model.covar_module
    dense = kernel(case.x).to_dense()
    selected = case.x if kernel.active_dims is None else case.x[..., kernel.active_dims]
    features = feature_map(kernel)(selected)
    assert features.basis.shape == (12, features.variances.shape[-1])
    assert features.basis.dtype == features.variances.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    scaled = features.scaled()
    torch.testing.assert_close(scaled @ scaled.mT, dense, rtol=tolerance, atol=tolerance)
    weights = torch.cos(torch.arange(144.0)).view(12, 12).to(dtype)
    by_kernel = torch.autograd.grad((dense * weights).sum(), list(kernel.parameters()))
    by_features = torch.autograd.grad((scaled @ scaled.mT * weights).sum(), list(kernel.parameters()))
    for left, right in zip(by_features, by_kernel, strict=True):
        torch.testing.assert_close(left, right, rtol=100 * tolerance, atol=100 * tolerance)
    empty = feature_map(kernel)(selected[:0])
    assert empty.basis.shape == empty.scaled().shape == (0, features.basis.shape[-1])
    assert empty.variances.shape == features.variances.shape


@pytest.mark.parametrize("name", ["linear", "fourier", "polynomial", "deep"])
def test_batches_of_inputs(name: str) -> None:
    case = feature_case(KERNELS[name](), n=12)
    x = case.x.view(2, 6, 3)
    scaled = feature_map(case.model.covar_module)(x).scaled()
    torch.testing.assert_close(scaled @ scaled.mT, case.model.covar_module(x).to_dense(), rtol=1e-10, atol=1e-10)


def test_batches_of_kernels() -> None:
    two = torch.Size([2])
    kernel = kernels.ScaleKernel(kernels.LinearKernel(batch_shape=two), batch_shape=two) + kernels.PolynomialKernel(
        power=2, batch_shape=two
    )
    for parameter in kernel.parameters():
        parameter.data = torch.arange(float(parameter.numel())).view_as(parameter)
    x, _ = data(8, dtype=torch.float32)
    scaled = feature_map(kernel)(x).scaled()
    assert scaled.shape == (2, 8, 3 + 10)
    torch.testing.assert_close(scaled @ scaled.mT, kernel(x.expand(2, 8, 3)).to_dense(), rtol=1e-5, atol=1e-5)


def test_polynomial_has_its_distinct_monomials() -> None:
    x, _ = data(5)
    assert feature_map(kernels.PolynomialKernel(power=3))(x).basis.shape == (5, 20)  # C(3 + 3, 3)


@pytest.mark.parametrize("base", [kernels.LinearKernel, lambda: kernels.ScaleKernel(fourier(20, 5))])
@pytest.mark.parametrize("n", [12, 40])
def test_plain_gpytorch_runs_on_a_deep_feature_kernel(base, n: int) -> None:
    """Value and predictions of ExactGP, with more and with fewer data than features, are those of dense matrices."""
    case = feature_case(gpi.kernels.DeepFeatureKernel(network(), base()), n=n)
    model, likelihood = case.model, case.likelihood
    test_x = case.x[:4] + 0.1
    kernel = model.covar_module
    whole = kernel(torch.cat([case.x, test_x])).to_dense().detach()
    noisy = whole[:n, :n] + likelihood.noise.detach() * torch.eye(n)
    mean = model.mean_module(case.x).detach()
    normal = torch.distributions.MultivariateNormal(mean, noisy)
    with gpytorch.settings.fast_computations(False, False, False):
        value = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)(model(case.x), case.y)
    torch.testing.assert_close(value.detach(), normal.log_prob(case.y) / n, rtol=1e-8, atol=1e-8)
    model.eval()
    with torch.no_grad():
        found = model(test_x)
    cross = whole[n:, :n]
    expected = mean[:1] + cross @ torch.linalg.solve(noisy, case.y - mean)
    torch.testing.assert_close(found.mean, expected, rtol=1e-6, atol=1e-6)
    variance = (whole[n:, n:] - cross @ torch.linalg.solve(noisy, cross.mT)).diagonal()
    torch.testing.assert_close(found.variance, variance, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        assert model(test_x[:0]).mean.shape == (0,)


def test_diagonals_and_rectangles() -> None:
    x, _ = data(9)
    kernel = Quadratic().double()
    dense = kernel(x).to_dense()
    torch.testing.assert_close(kernel(x, diag=True), dense.diagonal())
    torch.testing.assert_close(kernel(x, x[:4]).to_dense(), dense[:, :4])
    torch.testing.assert_close(kernel(x[:4], x[4:8], diag=True), dense[:4, 4:8].diagonal())
    with pytest.raises(ValueError, match="last_dim_is_batch"):
        kernel.forward(x, x, last_dim_is_batch=True)


@pytest.mark.parametrize(
    "make",
    [
        kernels.RBFKernel,
        lambda: kernels.ScaleKernel(kernels.MaternKernel()),
        lambda: kernels.LinearKernel() + kernels.RBFKernel(),
        lambda: kernels.LinearKernel() * kernels.RBFKernel(),
        lambda: type("Squared", (kernels.LinearKernel,), {})(),
    ],
)
def test_kernels_without_features_are_named(make) -> None:
    kernel = make()
    assert not has_feature_map(kernel)
    with pytest.raises(
        ValueError, match=r"(RBF|Matern|Squared)\w* has no finite feature map.*LinearKernel.*FiniteFeature"
    ):
        feature_map(kernel)
    with pytest.raises(ValueError, match="has no finite feature map"):
        gpi.kernels.DeepFeatureKernel(network(), kernel)


def test_what_a_kernel_with_features_is_made_of_is_its_own() -> None:
    class Landmarks(gpi.kernels.FiniteFeatureKernel):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kernels.RBFKernel()

        def features(self, x: Tensor) -> Tensor:
            return self.inner(x, x.new_zeros(1, x.shape[-1])).to_dense()

    assert has_feature_map(kernels.ScaleKernel(Landmarks()))


def test_an_extractor_that_is_no_module() -> None:
    with pytest.raises(TypeError, match="feature_extractor"):
        gpi.kernels.DeepFeatureKernel(None, kernels.LinearKernel())


def test_an_extractor_that_loses_a_dimension() -> None:
    extractor = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(-2))
    case = feature_case(gpi.kernels.DeepFeatureKernel(extractor, kernels.LinearKernel()))
    with pytest.raises(ValueError, match=r"\(2, 3\) to \(2,\)"):
        gpi.mlls.VariationalFeatureMarginalLogLikelihood(case.likelihood, case.model)
    with pytest.raises(ValueError, match=r"\(40, 3\) to \(40,\)"):
        case.model(case.x).covariance_matrix  # noqa: B018


def test_features_that_are_missing_or_of_other_rows() -> None:
    class Transposed(gpi.kernels.FiniteFeatureKernel):
        def features(self, x: Tensor) -> Tensor:
            return x.mT

    x, _ = data(4)
    with pytest.raises(ValueError, match=r"Transposed.features .*\(4, 3\) to \(3, 4\)"):
        feature_map(Transposed())(x)
    with pytest.raises(NotImplementedError, match=r"must define features\(x\)"):
        feature_map(gpi.kernels.FiniteFeatureKernel())(x)


def test_members_of_a_batch_of_deep_kernels() -> None:
    base = kernels.LinearKernel(batch_shape=torch.Size([2]))
    base.raw_variance.data[1] += 1
    kernel = gpi.kernels.DeepFeatureKernel(network(), base)
    assert kernel.batch_shape == torch.Size([2])
    x, _ = data(6, dtype=torch.float32)
    torch.testing.assert_close(kernel[1](x).to_dense(), kernel(x).to_dense()[1])


def test_a_registered_kernel() -> None:
    class Mirrored(kernels.LinearKernel):
        pass

    @register_feature_map(Mirrored)
    def _(kernel: Mirrored):
        def features(x: Tensor) -> gpi.kernels.WeightSpaceFeatures:
            return gpi.kernels.WeightSpaceFeatures(-x, kernel.variance.squeeze(-2).expand(x.shape[-1]))

        return features

    assert has_feature_map(kernels.ScaleKernel(Mirrored()))
    x, _ = data(4, dtype=torch.float32)
    scaled = feature_map(kernels.ScaleKernel(Mirrored()))(x).scaled()
    torch.testing.assert_close(scaled @ scaled.mT, kernels.ScaleKernel(Mirrored())(x).to_dense())

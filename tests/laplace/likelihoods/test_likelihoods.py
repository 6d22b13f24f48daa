"""Derivatives, curvature, tails and supports of every likelihood that Laplace's method takes."""

import math
from typing import Any

import gpytorch.likelihoods as gl
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Categorical, Normal

from gpy_iterative.errors import NonFiniteError, UnsupportedLikelihoodError, VarianceWarning
from gpy_iterative.laplace.likelihoods import stock
from gpy_iterative.laplace.likelihoods.pointwise import COVARIANCE_FLOOR, NO_FLOOR, STEP_FLOOR
from gpy_iterative.likelihoods import (
    LogitBernoulliLikelihood,
    PointwiseLikelihood,
    PoissonLogLikelihood,
    register_curvature,
)
from tests.laplace.cases import LIKELIHOODS, case


def latents(name: str, n: int = 12) -> tuple[PointwiseLikelihood, Tensor]:
    problem = case(name, n=n)
    index = torch.arange(n * problem.model.latents, dtype=torch.float64)
    return problem.pointwise(), (2 * torch.sin(1.3 * index)).view(n, -1)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_log_density_is_that_of_forward(name: str) -> None:
    likelihood, f = latents(name)
    inner = likelihood.likelihood.double()
    values = f if f.shape[1] > 1 else f.squeeze(-1)
    torch.testing.assert_close(likelihood.log_prob(f), inner(values).log_prob(likelihood.targets), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_samples_have_the_log_densities_of_each(name: str) -> None:
    likelihood, f = latents(name)
    check_samples(likelihood, f)


def test_samples_of_noise_by_point_of_tasks_and_of_the_users_own_forward() -> None:
    _, f = latents("student")
    noise = 0.1 + torch.arange(12.0)
    check_samples(PointwiseLikelihood(gl.FixedNoiseGaussianLikelihood(noise), f[:, 0].cos(), 1), f)
    check_samples(PointwiseLikelihood(Cauchy(), f[:, 0].cos(), 1), f)
    tasks = f.view(6, 2)
    check_samples(PointwiseLikelihood(gl.MultitaskGaussianLikelihood(num_tasks=2), tasks.cos(), 2), tasks)


def check_samples(likelihood: PointwiseLikelihood, f: Tensor) -> None:
    samples = torch.stack([f, -f, 0.3 * f])
    torch.testing.assert_close(likelihood.log_probs(samples), torch.stack([likelihood.log_prob(f) for f in samples]))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_gradient_and_hessian_are_differences(name: str) -> None:
    likelihood, f = latents(name)
    step = 1e-5
    gradient, hessian = likelihood.gradient(f), likelihood.hessian(f).detach()
    for latent in range(f.shape[1]):
        shift = torch.zeros_like(f)
        shift[:, latent] = step
        with torch.no_grad():
            slope = (likelihood.log_prob(f + shift) - likelihood.log_prob(f - shift)) / (2 * step)
        bend = -(likelihood.gradient(f + shift) - likelihood.gradient(f - shift)) / (2 * step)
        torch.testing.assert_close(gradient[:, latent], slope, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(hessian[:, latent], bend, rtol=1e-6, atol=1e-7)


class LogLinear(gl.Likelihood):
    """An unnormalised density whose logarithm is linear in the first of its latents, or in all."""

    def __init__(self, *, bends: bool) -> None:
        super().__init__()
        self.bends = bends

    def forward(self, f: Tensor) -> torch.distributions.Distribution:
        likelihood = self

        class Density(torch.distributions.Distribution):
            def log_prob(self, y: Tensor) -> Tensor:
                first, second = f.unbind(-1)
                return y * first - (second.square() if likelihood.bends else second)

        return Density(f.shape[:-1], validate_args=False)


@pytest.mark.parametrize("bends", [True, False])
def test_hessian_of_a_log_density_that_is_linear(bends: bool) -> None:
    likelihood = PointwiseLikelihood(LogLinear(bends=bends), torch.ones(3).double(), 2)
    expected = torch.diag(torch.tensor([0.0, 2.0 * bends]).double()).expand(3, 2, 2)
    torch.testing.assert_close(likelihood.hessian(torch.ones(3, 2).double()), expected, check_stride=False)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_curvature_is_its_own_algebra(name: str) -> None:
    """W = R R^T, W W^+ W = W, and W^+ is symmetric in the Penrose sense; products agree with dense blocks."""
    likelihood, f = latents(name)
    curvature = likelihood.curvature(f, COVARIANCE_FLOOR)
    size = f.numel()
    eye = torch.eye(size, dtype=torch.float64)
    dense = torch.block_diag(*curvature.blocks())
    root = curvature.root(torch.eye(curvature.num_columns, dtype=torch.float64))
    torch.testing.assert_close(curvature.matmul(eye), dense)
    torch.testing.assert_close(root @ root.mT, dense)
    torch.testing.assert_close(curvature.root_t(eye), root.mT)
    torch.testing.assert_close(curvature.pinv(eye), torch.linalg.pinv(dense, rtol=1e-12), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(curvature.project(eye), curvature.matmul(curvature.pinv(eye)), rtol=1e-8, atol=1e-8)
    assert torch.linalg.eigvalsh(dense).min() > -1e-10


@pytest.mark.parametrize("name", ["softmax", "softmax-mixed", "softmax-wide"])
def test_softmax_does_not_see_what_all_classes_share(name: str) -> None:
    likelihood, f = latents(name)
    weights = likelihood.likelihood.mixing_weights
    weights = torch.eye(3) if weights is None else weights.detach()
    invisible = torch.linalg.pinv(weights.double()) @ torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(likelihood.log_prob(f), likelihood.log_prob(f + 5 * invisible))
    for floor in (STEP_FLOOR, COVARIANCE_FLOOR, NO_FLOOR):
        image = likelihood.curvature(30 * f, floor).project(invisible.repeat(len(f)).unsqueeze(-1))
        assert image.abs().max() < 1e-6


def test_as_many_points_as_classes() -> None:
    """GPyTorch's own forward transposes such an input."""
    y, f = torch.tensor([0, 1, 2]), torch.tensor([[2.0, 0, -1], [0.5, 1, 3], [0, 0, 1]], dtype=torch.float64)
    likelihood = PointwiseLikelihood(gl.SoftmaxLikelihood(num_classes=3, mixing_weights=False), y, 3)
    torch.testing.assert_close(likelihood.log_prob(f), Categorical(logits=f).log_prob(y))


def test_tails() -> None:
    """Where GPyTorch's clamps make gradients vanish: a wrong label far out pulls with about |f|."""
    f = torch.tensor([[-12.0], [-3.0], [12.0]], dtype=torch.float64)
    likelihood = PointwiseLikelihood(gl.BernoulliLikelihood(), torch.ones(3), 1)
    gradient, hessian = likelihood.gradient(f).squeeze(-1), likelihood.hessian(f).detach().flatten()
    expected = [12.082, 3.2831, 0.0]  # phi / Phi
    assert gradient.tolist() == pytest.approx(expected, abs=1e-3)
    assert hessian.tolist() == pytest.approx([0.9934, 0.9296, 0.0], abs=1e-3)
    counts = PointwiseLikelihood(gl.PoissonLikelihood(), torch.tensor([3.0]), 1)
    low = torch.tensor([[-200.0]], dtype=torch.float64)
    assert counts.total(low) == pytest.approx(3 * -200.0 - math.log(6))
    assert counts.gradient(low).item() == pytest.approx(3.0)


@pytest.mark.parametrize("z", [-12.1, -30.0, -1e3, -1e4, -1e5, -1e8])
def test_probit_tails_through_three_derivatives(z: float) -> None:
    """-z - 1/z + 2/z^3 - 10/z^5 and its derivatives, of which a difference of size z would leave nothing."""
    f = torch.tensor([[z]], dtype=torch.float64, requires_grad=True)
    likelihood = PointwiseLikelihood(gl.BernoulliLikelihood(), torch.ones(1), 1)
    hessian = likelihood.hessian(f)
    (third,) = torch.autograd.grad(hessian.sum(), f)
    x = 1 / z**2
    assert likelihood.gradient(f).item() == pytest.approx(-z * (1 + x - 2 * x**2 + 10 * x**3 - 74 * x**4), rel=1e-6)
    assert hessian.item() == pytest.approx(1 - x + 6 * x**2 - 50 * x**3 + 518 * x**4, rel=1e-6)
    assert third.item() == pytest.approx(2 * x * (1 - 12 * x + 150 * x**2 - 2072 * x**3) / z, rel=1e-3)


def test_probits_without_tails_take_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """The series would take most of the time of all derivatives."""
    monkeypatch.delattr(stock, "_log_normal_tail")
    f = torch.tensor([[-12.0], [0.0], [12.0]], dtype=torch.float64)
    likelihood = PointwiseLikelihood(gl.BernoulliLikelihood(), torch.tensor([1.0, 0.0, 1.0]), 1)
    torch.testing.assert_close(likelihood.log_prob(f), torch.special.log_ndtr(f[:, 0]))


def test_a_wrong_promise_of_concavity_is_told_as_one() -> None:
    register_curvature(Bent, lambda _, f, y: 0.1 * (y - f[:, 0]).square(), log_concave=True)
    bent = PointwiseLikelihood(Bent(), torch.tensor([0.1, -1.0]), 1)
    with pytest.raises(UnsupportedLikelihoodError, match=r"registered as log-concave.* at latent values up to 4: "):
        bent.curvature(torch.tensor([[0.0], [4.0]], dtype=torch.float64), NO_FLOOR)


def test_fisher_information_is_the_expected_hessian() -> None:
    f = torch.tensor([[0.3]], dtype=torch.float64)
    grid = torch.linspace(1e-4, 1 - 1e-4, 20001, dtype=torch.float64)
    beta = PointwiseLikelihood(gl.BetaLikelihood(), grid, 1)
    many = f.expand(len(grid), 1)
    with torch.no_grad():
        density = beta.log_prob(many).exp()
    expected = torch.trapezoid(density * beta.hessian(many).detach().flatten(), grid)
    torch.testing.assert_close(beta.curvature_blocks(many)[0, 0, 0].detach(), expected, rtol=1e-4, atol=1e-6)
    y = torch.linspace(-300, 300, 600_001, dtype=torch.float64)
    student = PointwiseLikelihood(gl.StudentTLikelihood().double(), y, 1)
    many = f.expand(len(y), 1)
    with torch.no_grad():
        density = student.log_prob(many).exp()
    expected = torch.trapezoid(density * student.hessian(many).detach().flatten(), y)
    torch.testing.assert_close(student.curvature_blocks(many)[0, 0, 0].detach(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["student", "negative-binomial", "beta"])
def test_what_is_not_concave(name: str) -> None:
    likelihood, f = latents(name)
    far = 3 * f + 3 * (name == "student")
    assert likelihood.hessian(far).min() < 0
    assert likelihood.curvature(far, NO_FLOOR).blocks().min() >= 0
    torch.testing.assert_close(likelihood.step_curvature(far).blocks().amax(), likelihood.hessian(far).abs().amax())


class Cauchy(gl.likelihood._OneDimensionalLikelihood):
    """Nothing is registered for it."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Cauchy:
        return torch.distributions.Cauchy(function_samples, 0.5)


class Absolute(gl.likelihood._OneDimensionalLikelihood):
    """Median regression."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Laplace:
        return torch.distributions.Laplace(function_samples, 0.3)


class Coupled(gl.Likelihood):
    """Does not factorise over points."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.MultivariateNormal:
        return torch.distributions.MultivariateNormal(function_samples, torch.eye(len(function_samples)).double())


class Bent(gl.likelihood._OneDimensionalLikelihood):
    """Registered as what it is not."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Normal:
        raise AssertionError("the registered density is used")


class Logistic(gl.likelihood._OneDimensionalLikelihood):
    """Registered below."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Normal:
        raise AssertionError("the registered density is used")


class Broadcast(gl.likelihood._OneDimensionalLikelihood):
    """Registered without taking the only latent function: [n, 1] and [n] give [n, n]."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Normal:
        raise AssertionError("the registered density is used")


@pytest.mark.parametrize(
    ("likelihood", "shape"),
    [
        (Broadcast(), r"\(2, 2\)"),
        (gl.NegativeBinomialLikelihood(batch_shape=torch.Size([3])), r"\(3, 2\)"),
        (gl.StudentTLikelihood(batch_shape=torch.Size([3])), r"\(3, 2\)"),
    ],
)
def test_more_than_one_density_for_a_point_is_refused(likelihood: gl.Likelihood, shape: str) -> None:
    """Their sum would be maximised."""
    register_curvature(Broadcast, lambda _, f, y: -(y - f).square(), log_concave=True)
    pointwise = PointwiseLikelihood(likelihood, torch.tensor([1.0, 2.0]), 1)
    with pytest.raises(
        ValueError, match=f"{type(likelihood).__name__} gives log densities of shape {shape} for 2 points"
    ):
        pointwise.log_prob(torch.zeros(2, 1).double())


def test_likelihoods_of_the_users_own() -> None:
    f, y = torch.tensor([[0.0], [4.0]], dtype=torch.float64), torch.tensor([0.1, -1.0])
    cauchy = PointwiseLikelihood(Cauchy(), y, 1)
    with pytest.warns(VarianceWarning, match="absolute value"):
        assert cauchy.curvature(f, NO_FLOOR).blocks().min() > 0
    with pytest.raises(ValueError, match="factorises over points"):
        PointwiseLikelihood(Coupled(), y, 1).log_prob(f)
    register_curvature(
        Logistic,
        lambda _, f, y: -(y - f[:, 0]) - 2 * torch.nn.functional.softplus(-(y - f[:, 0])),
        log_concave=True,
        support=(lambda _, y: y > -2, "targets must exceed -2"),
    )
    logistic = PointwiseLikelihood(Logistic(), y, 1)
    t = torch.sigmoid(y.double() - f[:, 0])
    torch.testing.assert_close(logistic.curvature(f, NO_FLOOR).blocks().flatten(), 2 * t * (1 - t))
    with pytest.raises(ValueError, match=r"targets must exceed -2, but targets\[1\] is -3"):
        PointwiseLikelihood(Logistic(), torch.tensor([0.0, -3.0]), 1)


@pytest.mark.parametrize(
    ("likelihood", "y", "match"),
    [
        (gl.BernoulliLikelihood(), [-1.0, 1.0], r"BernoulliLikelihood: labels must be 0 or 1.*targets\[0\] is -1"),
        (LogitBernoulliLikelihood(), [0.0, 2.0], r"targets\[1\] is 2"),
        (gl.PoissonLikelihood(), [1.0, -1.0], "not negative"),
        (PoissonLogLikelihood(), [1.0, 1.5], "whole numbers"),
        (gl.NegativeBinomialLikelihood(), [1.0, 1.5], "whole numbers"),
        (gl.BetaLikelihood(), [0.5, 1.0], "between 0 and 1"),
        (gl.StudentTLikelihood(), [0.5, math.nan], r"targets\[1\] is nan"),
        (gl.GaussianLikelihood(), [math.inf, 0.0], r"targets\[0\] is inf"),
    ],
)
def test_targets_outside_the_support(likelihood: gl.Likelihood, y: list[float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PointwiseLikelihood(likelihood, torch.tensor(y), 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.long, torch.float32])
def test_targets_of_any_dtype_that_can_hold_them(dtype: torch.dtype) -> None:
    f, y = torch.tensor([[0.3], [-1.0]], dtype=torch.float64), torch.tensor([0, 1])
    for inner in (gl.BernoulliLikelihood(), LogitBernoulliLikelihood(), gl.PoissonLikelihood(), PoissonLogLikelihood()):
        expected = PointwiseLikelihood(inner, y.double(), 1).log_prob(f)
        torch.testing.assert_close(PointwiseLikelihood(inner, y.to(dtype), 1).log_prob(f), expected)


def test_targets_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"BernoulliLikelihood needs targets \[n\].*got \(4, 1\).*squeeze"):
        PointwiseLikelihood(gl.BernoulliLikelihood(), torch.ones(4, 1), 1)
    with pytest.raises(ValueError, match=r"Cauchy needs targets \[n\]"):
        PointwiseLikelihood(Cauchy(), torch.ones(4, 1), 1)
    softmax = gl.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    with pytest.raises(ValueError, match=r"SoftmaxLikelihood needs targets \[n\]"):
        PointwiseLikelihood(softmax, torch.eye(3).long(), 3)
    for shape in ((4,), (4, 1), (4, 3)):
        with pytest.raises(ValueError, match=r"needs targets \[n, 2\]"):
            PointwiseLikelihood(gl.MultitaskGaussianLikelihood(num_tasks=2), torch.ones(shape), 2)


@pytest.mark.parametrize("more", [False, True])
def test_fixed_noise_belongs_to_its_points(more: bool) -> None:
    """GPyTorch takes the fixed noise of another number of points for zero."""
    inner = gl.FixedNoiseGaussianLikelihood(torch.full((5,), 0.5), learn_additional_noise=more)
    f = torch.zeros(5, 1, dtype=torch.float64)
    PointwiseLikelihood(inner, torch.zeros(5), 1).log_prob(f)
    with pytest.raises(ValueError, match="noise for 5 points, and there are 4"):
        PointwiseLikelihood(inner, torch.zeros(4), 1).log_prob(f[:4])


def test_labels_of_a_softmax() -> None:
    softmax = gl.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    with pytest.raises(ValueError, match=r"0 to num_classes - 1, but targets\[1\] is 3"):
        PointwiseLikelihood(softmax, torch.tensor([0, 3]), 3)
    with pytest.raises(ValueError, match="integer dtype"):
        PointwiseLikelihood(softmax, torch.tensor([0.0, 1.0]), 3)
    with pytest.raises(ValueError, match="needs 3 latent functions, the model has 1"):
        PointwiseLikelihood(softmax, torch.tensor([0, 1]), 1)


@pytest.mark.parametrize(
    ("likelihood", "match"),
    [
        (gl.LaplaceLikelihood(), "zero almost everywhere"),
        (gl.MultitaskGaussianLikelihood(num_tasks=2, rank=1), "rank"),
        (gl.DirichletClassificationLikelihood(torch.tensor([0, 1])), "SoftmaxLikelihood"),
    ],
)
def test_refusals(likelihood: gl.Likelihood, match: str) -> None:
    with pytest.raises(UnsupportedLikelihoodError, match=match):
        PointwiseLikelihood(likelihood, torch.zeros(2), 2)


def test_latent_values_out_of_range() -> None:
    likelihood = PointwiseLikelihood(PoissonLogLikelihood(), torch.tensor([1.0]), 1)
    assert likelihood.total(torch.tensor([[800.0]], dtype=torch.float64)) == -math.inf
    with pytest.raises(NonFiniteError, match="datum 0"):
        likelihood.gradient(torch.tensor([[800.0]], dtype=torch.float64))


def test_own_likelihoods_as_gpytorch_uses_them() -> None:
    """Marginals and expectations against plain sums over a fine grid."""
    mean, variance = torch.tensor([0.4, -2.0]).double(), torch.tensor([1.5, 0.3]).double()
    latent = MultivariateNormal(mean, torch.diag(variance))
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    f = mean + variance.sqrt() * grid.unsqueeze(-1)
    weights = Normal(0.0, 1.0).log_prob(grid).exp().unsqueeze(-1) * (grid[1] - grid[0])
    for likelihood, y in (
        (LogitBernoulliLikelihood(), torch.tensor([1.0, 0.0]).double()),
        (PoissonLogLikelihood(), torch.tensor([2.0, 1.0]).double()),
    ):
        log_probs = likelihood(f).log_prob(y)
        torch.testing.assert_close(
            likelihood.expected_log_prob(y, latent), (weights * log_probs).sum(0), rtol=1e-8, atol=1e-8
        )
        torch.testing.assert_close(
            likelihood.log_marginal(y, latent), (weights * log_probs.exp()).sum(0).log(), rtol=1e-6, atol=1e-6
        )
    probabilities = LogitBernoulliLikelihood()(latent).probs
    torch.testing.assert_close(probabilities, (weights * torch.sigmoid(f)).sum(0), rtol=1e-8, atol=1e-8)
    for call in (LogitBernoulliLikelihood().expected_log_prob, LogitBernoulliLikelihood().log_marginal):
        expected = call(torch.tensor([1.0, 0.0]).double(), latent)
        for labels in (torch.tensor([1, 0]), torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([True, False])):
            torch.testing.assert_close(call(labels, latent), expected, rtol=0, atol=0)
        torch.testing.assert_close(call(torch.tensor([[1, 0]]), latent), expected.unsqueeze(0), rtol=0, atol=0)
        with pytest.raises(ValueError, match=r"labels must be 0 or 1 \(for -1 and 1 .*, but targets\[0, 1\] is -1"):
            call(torch.tensor([[1.0, -1.0]]).double(), latent)


@pytest.mark.parametrize("latent", [-1e3, -40.0, 800.0, 1e5])
def test_poisson_counts_of_any_size_have_finite_derivatives(latent: float) -> None:
    counts = torch.tensor([max(round(latent), 0)]).double()
    likelihood = PointwiseLikelihood(gl.PoissonLikelihood(), counts, 1)
    f = torch.full((1, 1), latent, dtype=torch.float64)
    for derivative in (likelihood.gradient(f), likelihood.hessian(f)):
        assert torch.isfinite(derivative).all()


@pytest.mark.parametrize("num_failures_param", [True, False])
@pytest.mark.parametrize("latent", [-1e3, -40.0])
def test_negative_binomial_counts_far_below_zero(latent: float, num_failures_param: bool) -> None:
    """The rate is exp(f), so that log p(y | f) is f and a constant for y > 0."""
    likelihood = gl.NegativeBinomialLikelihood(num_failures_param=num_failures_param)
    f = torch.full((2, 1), latent, dtype=torch.float64)
    counts = PointwiseLikelihood(likelihood, torch.tensor([0.0, 3.0]), 1)
    assert counts.gradient(f).flatten().tolist() == pytest.approx([0.0, 1.0])
    assert counts.hessian(f).flatten().tolist() == pytest.approx([0.0, 0.0])


def test_a_rate_of_zero_has_no_counts() -> None:
    """As `forward` has it: where nothing is exposed, zero is certain."""
    counts = torch.tensor([0.0, 2.0, 0.0]).double()
    mean = torch.tensor([-math.inf, -math.inf, 0.3]).double()
    latent = MultivariateNormal(mean, torch.eye(3, dtype=torch.float64))
    likelihood = PoissonLogLikelihood()
    pointwise = PointwiseLikelihood(likelihood, counts, 1)
    torch.testing.assert_close(pointwise.log_prob(mean.unsqueeze(-1)), likelihood(mean).log_prob(counts))
    for value in (likelihood.log_marginal(counts, latent), likelihood.expected_log_prob(counts, latent)):
        assert value[:2].tolist() == pytest.approx([0.0, -math.inf], abs=1e-12)  # weights' sum rounds
        assert -3 < value[2] < 0


def test_several_functions_that_are_not_concave_need_fisher_information() -> None:
    register_curvature(Bent, lambda _, f, y: 0.1 * (y - f.sum(-1)).square(), log_concave=False, num_latents=2)
    bent = PointwiseLikelihood(Bent(), torch.tensor([0.1, -1.0]), 2)
    for curvature in (bent.step_curvature, bent.curvature_blocks):
        with pytest.raises(UnsupportedLikelihoodError, match="no Fisher information is registered"):
            curvature(torch.zeros(2, 2).double())


def test_an_own_density_without_curvature_is_refused() -> None:
    absolute = PointwiseLikelihood(Absolute(), torch.tensor([0.1, -1.0]), 1)
    for curvature in (absolute.step_curvature, lambda f: absolute.curvature(f, COVARIANCE_FLOOR)):
        with pytest.raises(UnsupportedLikelihoodError, match="Absolute: the second derivative"):
            curvature(torch.zeros(2, 1).double())

"""Random features have the kernel as their mean, for every kernel that has features and for what is made of them."""

from collections.abc import Callable

import pytest
import torch
from gpytorch import kernels

from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.linear_operators.prior_parts import KernelTerm, kernel_terms
from gpy_iterative.spectral import RandomFourierFeatures
from gpy_iterative.spectral import features as spectral_features
from tests.exact.gaussian_models import data
from tests.monte_carlo import assert_mean_within

#: GPyTorch deprecates the kernels that sum or multiply one kernel of each dimension.
pytestmark = pytest.mark.filterwarnings("ignore:.*StructureKernel.*:DeprecationWarning")

KERNELS = {
    "rbf": lambda: kernels.RBFKernel(ard_num_dims=3),
    "matern-1/2": lambda: kernels.MaternKernel(nu=0.5, ard_num_dims=3),
    "matern-3/2": lambda: kernels.MaternKernel(nu=1.5, ard_num_dims=3),
    "matern-5/2": lambda: kernels.MaternKernel(nu=2.5, ard_num_dims=3),
    "rational quadratic": lambda: kernels.RQKernel(ard_num_dims=3),
    "scaled sum": lambda: kernels.ScaleKernel(
        kernels.RBFKernel(active_dims=(0, 2)) + kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, active_dims=(1,)))
    ),
    "product": lambda: kernels.ScaleKernel(
        kernels.RBFKernel(active_dims=(0,)) * kernels.MaternKernel(nu=2.5, active_dims=(1, 2))
    ),
    "product of sums": lambda: (
        (kernels.RBFKernel(active_dims=(0,)) + kernels.RBFKernel(active_dims=(1,))) * kernels.RQKernel()
    ),
    "linear": lambda: kernels.ScaleKernel(kernels.LinearKernel()) + kernels.RBFKernel(),
    "polynomial": lambda: kernels.ScaleKernel(kernels.PolynomialKernel(power=3)) + kernels.RBFKernel(),
    "constant": lambda: kernels.ScaleKernel(kernels.ConstantKernel()) + kernels.RBFKernel(),
    "spectral mixture": lambda: kernels.ScaleKernel(kernels.SpectralMixtureKernel(num_mixtures=4, ard_num_dims=3)),
    "additive structure": lambda: kernels.AdditiveStructureKernel(kernels.ScaleKernel(kernels.RBFKernel()), 3),
    "product structure": lambda: kernels.ScaleKernel(kernels.ProductStructureKernel(kernels.MaternKernel(nu=0.5), 3)),
    "multitask": lambda: kernels.MultitaskKernel(kernels.MaternKernel(nu=1.5), num_tasks=2, rank=1),
    "coregionalised": lambda: kernels.LCMKernel([kernels.RBFKernel(), kernels.LinearKernel()], num_tasks=3, rank=2),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> kernels.Kernel:
    kernel = KERNELS[name]().to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in kernel.parameters():
        parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return kernel


def features(kernel: kernels.Kernel, x: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    terms = kernel_terms(kernel(x))
    maker = RandomFourierFeatures(count)
    return maker.features(terms, maker.draw(terms, torch.Generator().manual_seed(seed)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in KERNELS]
    + [(name, torch.float32) for name in ("matern-3/2", "linear", "product")],
)
def test_features_reproduce_the_kernel(name: str, dtype: torch.dtype) -> None:
    kernel, (x, _) = make(name, dtype), data(40, dtype=dtype)
    phi = features(kernel, x, 25_000)
    assert phi.dtype == dtype
    matrix = kernel(x).to_dense()
    assert (phi @ phi.mT - matrix).abs().max() < 0.06 * matrix.max()


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_widened_draws_keep_the_kernel_and_see_short_distances(nu: float) -> None:
    """k(0) - k(r) of many lengthscales' data: of one in a thousand, by 8,000 frequencies."""
    kernel = kernels.MaternKernel(nu=nu).double()
    x = torch.tensor([0.0, 1e-3, 1.0]).double().unsqueeze(-1)
    errors = {False: [], True: []}
    for seed in range(8):
        for widened, found in errors.items():
            terms, maker = kernel_terms(kernel(x)), RandomFourierFeatures(8000, widened)
            phi = maker.features(terms, maker.draw(terms, torch.Generator().manual_seed(seed)))
            exact = kernel(x).to_dense().detach()
            assert (phi @ phi.mT - exact).abs().max() < 0.06
            contrast = torch.tensor([1.0, -1.0, 0.0]).double()
            found.append(float((contrast @ phi).square().sum() / (contrast @ exact @ contrast) - 1))
    assert max(map(abs, errors[True])) < 0.12
    if nu < 2:  # the smoother the kernel, the less hangs on high frequencies
        assert max(map(abs, errors[False])) > 2 * max(map(abs, errors[True]))


@pytest.mark.slow
@pytest.mark.parametrize("num_frequencies", [3, 40])
@pytest.mark.parametrize(
    "name", ["rational quadratic", "product", "product of sums", "spectral mixture", "coregionalised"]
)
def test_widened_draws_are_unbiased(name: str, num_frequencies: int) -> None:
    kernel, (x, _), generator = make(name), data(8), torch.Generator().manual_seed(0)
    terms, maker = kernel_terms(kernel(x)), RandomFourierFeatures(num_frequencies, widened=True)
    phi = torch.stack([maker.features(terms, maker.draw(terms, generator)) for _ in range(600)])
    assert_mean_within(phi @ phi.mT, kernel(x).to_dense().detach(), max_sem=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel_class", "factors", "dims", "lengthscale", "noise"),
    [
        (kernels.RBFKernel, 1, 1, 0.1, 1e-4),
        (kernels.RBFKernel, 1, 2, 0.3, 0.01),
        (kernels.RBFKernel, 1, 8, 2.0, 1e-4),
        (kernels.RBFKernel, 1, 20, 5.0, 0.01),
        (kernels.RBFKernel, 2, 2, 0.3, 0.01),
        (kernels.RBFKernel, 8, 8, 2.0, 1e-4),
        (kernels.RQKernel, 1, 1, 0.1, 1e-4),
        (kernels.RQKernel, 1, 2, 0.3, 1e-3),
    ],
)
def test_posterior_variance_of_widened_draws(
    kernel_class: type[kernels.Kernel], factors: int, dims: int, lengthscale: float, noise: float
) -> None:
    """Given the features, a path's contrast c = [-H^-1 k, 1] has the variance |Phi^T c|^2 + noise |H^-1 k|^2.

    Frequencies of the kernel's own density, of which the tail hardly gets one, give .93 to 1.2 times the posterior's.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(630, dims, generator=generator, dtype=torch.float64)
    parts = torch.arange(dims).chunk(factors)
    kernel = kernels.ProductKernel(*[kernel_class(active_dims=tuple(part.tolist())) for part in parts]).double()
    for each in kernel.kernels:
        each.lengthscale = lengthscale
    terms, maker = kernel_terms(kernel(x)), RandomFourierFeatures(8192, widened=True)
    matrix = kernel(x).to_dense().detach()
    noisy = matrix[:600, :600] + noise * torch.eye(600, dtype=torch.float64)
    weights = torch.linalg.solve(noisy, matrix[:600, 600:])
    exact = matrix.diagonal()[600:] - (matrix[:600, 600:] * weights).sum(0)
    contrast = torch.cat([-weights, torch.eye(30, dtype=torch.float64)])
    for seed in range(2):
        phi = maker.features(terms, maker.draw(terms, torch.Generator().manual_seed(seed)))
        ratio = ((phi.mT @ contrast).square().sum(0) + noise * weights.square().sum(0)) / exact
        assert 0.98 < ratio.median() < 1.02
        assert ratio.min() > 0.9
        assert ratio.max() < 1.1


def test_one_chi_square_for_each_frequency_not_for_each_coordinate() -> None:
    """The mistake, whose features are those of a product of one-dimensional kernels, is visible at once."""
    kernel, (x, _) = kernels.MaternKernel(nu=1.5).double(), data(40, d=5)
    kernel.lengthscale = 2.5
    terms, maker = kernel_terms(kernel(x)), RandomFourierFeatures(100_000)
    generator = torch.Generator().manual_seed(0)
    draws = maker.draw(terms, generator)
    right = maker.features(terms, draws)
    wrong_mixing = torch.randn(3, 5, 100_000, generator=generator, dtype=torch.float64).square().sum(0)
    wrong = maker.features(terms, draws | {"term0.chi_square": wrong_mixing})
    matrix = kernel(x).to_dense()
    assert (right @ right.mT - matrix).abs().max() < 0.03
    assert (wrong @ wrong.mT - matrix).abs().max() > 0.1


def test_scale_of_a_term() -> None:
    kernel, (x, _) = make("rbf"), data(40)
    terms = [KernelTerm(kernel, x, torch.tensor(4.0).double())]
    maker = RandomFourierFeatures(1000)
    draws = maker.draw(terms, torch.Generator().manual_seed(0))
    torch.testing.assert_close(maker.features(terms, draws), 2 * features(kernel, x, 1000))


@pytest.mark.parametrize("name", KERNELS)
def test_frozen_draws_move_smoothly_with_the_hyperparameters(name: str) -> None:
    """Difference quotients of two step sizes agree, in every hyperparameter at once."""
    kernel, (x, _) = make(name), data(20)
    maker = RandomFourierFeatures(100)
    draws = maker.draw(kernel_terms(kernel(x)), torch.Generator().manual_seed(0))
    start = [parameter.detach().clone() for parameter in kernel.parameters()]

    def moved(step: float) -> torch.Tensor:
        for parameter, value in zip(kernel.parameters(), start, strict=True):
            parameter.data = value + step
        return maker.features(kernel_terms(kernel(x)), draws)

    wide, narrow = ((moved(step) - moved(-step)) / (2 * step) for step in (2e-5, 1e-5))
    assert narrow.abs().max() > 1e-3
    torch.testing.assert_close(wide, narrow, rtol=1e-3, atol=1e-4 * float(narrow.abs().max()))


def test_applied_features_are_the_features_times_weights() -> None:
    kernel, (x, _) = make("scaled sum"), data(30)
    terms = kernel_terms(kernel(x))
    maker = RandomFourierFeatures(50)
    draws = maker.draw(terms, torch.Generator().manual_seed(0))
    weights = torch.randn(maker.num_features(terms), 4, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(maker.apply(terms, draws, weights), maker.features(terms, draws) @ weights)


def test_rows_in_blocks_are_the_rows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, (x, _) = make("linear"), data(30)
    terms, maker = kernel_terms(kernel(x)), RandomFourierFeatures(50)
    draws = maker.draw(terms, torch.Generator().manual_seed(0))
    whole = maker.features(terms, draws)
    monkeypatch.setattr(spectral_features, "ENTRIES_AT_A_TIME", 7 * 103)  # 7 rows, and 2 in the last block
    torch.testing.assert_close(maker.features(terms, draws), whole)
    torch.testing.assert_close(maker.apply(terms, draws, whole.mT), whole @ whole.mT)
    nothing = kernel_terms(kernel(x[:0]))
    assert maker.features(nothing, draws).shape == (0, 103)
    assert maker.apply(nothing, draws, whole.mT).shape == (0, 30)


def test_applied_features_are_differentiable_in_the_inputs() -> None:
    kernel, (x, _) = make("scaled sum"), data(4)
    maker = RandomFourierFeatures(5)
    draws = maker.draw(kernel_terms(kernel(x)), torch.Generator().manual_seed(0))
    weights = torch.randn(20, 2, generator=torch.Generator().manual_seed(1)).double()
    kernel.requires_grad_(False)
    function = lambda points: maker.apply(kernel_terms(kernel(points)), draws, weights)
    assert torch.autograd.gradcheck(function, x.requires_grad_())


@pytest.mark.parametrize("name", ["rbf", "rq", "scale of a sum"])
def test_batches_share_their_draws_and_keep_their_hyperparameters(name: str) -> None:
    batch = torch.Size([2])
    kernel = {
        "rbf": lambda: kernels.RBFKernel(ard_num_dims=3, batch_shape=batch),
        "rq": lambda: kernels.RQKernel(batch_shape=batch),
        "scale of a sum": lambda: kernels.ScaleKernel(
            kernels.MaternKernel(nu=2.5, batch_shape=batch) + kernels.RBFKernel(), batch_shape=batch
        ),
    }[name]().double()
    for parameter in kernel.parameters():
        parameter.data[1:] += 1.5
    x, _ = data(20)
    for inputs in (x, torch.stack([x, x.flip(0)])):
        phi = features(kernel, inputs, 50_000)
        matrix = kernel(inputs).to_dense()
        assert matrix.shape == (2, 20, 20)
        assert (matrix[0] - matrix[1]).abs().max() > 0.05
        assert (phi @ phi.mT - matrix).abs().max() < 0.03 * matrix.max()
    assert torch.equal(features(kernel, x, 10), features(kernel, x.expand(2, 20, 3), 10))


def test_draws_do_not_depend_on_the_dtype() -> None:
    """So a model moved to float32 keeps its functions."""
    x, _ = data(10)
    draws = [
        RandomFourierFeatures(20).draw(
            kernel_terms(make("matern-1/2", dtype)(x.to(dtype))), torch.Generator().manual_seed(0)
        )
        for dtype in (torch.float32, torch.float64)
    ]
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])


def test_huge_frequencies_keep_their_phases_in_float32() -> None:
    """Matern-1/2 draws frequencies of 1e6; float32 phases would be off by more than a turn."""
    x, _ = data(20)
    x = x.float()
    draws = {"term0.normal": torch.tensor([[1e7], [3e6], [2e5]]).double(), "term0.chi_square": torch.ones(1).double()}
    kernel = kernels.MaternKernel(nu=0.5)
    phi = RandomFourierFeatures(1).features(kernel_terms(kernel(x)), draws)
    omega = draws["term0.normal"] / kernel.lengthscale.double()
    right, careless = x.double() @ omega, x @ omega.float()
    assert (careless.sin() - right.sin()).abs().max() > 0.5
    torch.testing.assert_close(phi, torch.cat([right.sin(), right.cos()], dim=-1).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["matern-3/2", "product"])
def test_integers_have_the_features_of_their_numbers(name: str) -> None:
    """Phases are not integers."""
    x = torch.randint(10, (20, 3), generator=torch.Generator().manual_seed(0))
    kernel = make(name)
    assert torch.equal(features(kernel, x, 30), features(kernel, x.double(), 30))


def test_an_rff_kernel_brings_its_own_features() -> None:
    kernel, (x, _) = kernels.ScaleKernel(kernels.RFFKernel(num_samples=7, num_dims=3)).double(), data(20)
    phi = features(kernel, x, 100)
    assert phi.shape == (20, 14)
    torch.testing.assert_close(phi @ phi.mT, kernel(x).to_dense())


def test_a_factor_of_a_product_of_sums_is_drawn_once() -> None:
    kernel, (x, _) = make("product of sums"), data(5)
    draws = RandomFourierFeatures(10).draw(kernel_terms(kernel(x)), torch.Generator().manual_seed(0))
    assert sorted(name.rpartition(".")[0] for name in draws if "normal" in name) == [
        "term0.0.0",
        "term0.0.1",
        "term0.1",
    ]


class _Doubled(kernels.ScaleKernel):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class _OwnDistance(kernels.RBFKernel):
    def covar_dist(self, *args, **kwargs):
        return 3 * super().covar_dist(*args, **kwargs)


@pytest.mark.parametrize(
    "kernel",
    [
        kernels.PeriodicKernel(),
        _Doubled(kernels.RBFKernel()),
        _OwnDistance(),
        kernels.RBFKernelGrad(),
        kernels.RBFKernel() + kernels.CosineKernel(),
        kernels.LinearKernel() * kernels.RBFKernel(),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_kernels_without_a_density(kernel: kernels.Kernel) -> None:
    x, _ = data(10)
    with pytest.raises(SpectralDensityMissingError, match=r"register_spectral_density[\s\S]*Hutchinson"):
        RandomFourierFeatures(10).draw(kernel_terms(kernel.double()(x)), torch.Generator())


@pytest.mark.parametrize(
    ("make_kernel", "where"),
    [
        (
            lambda: kernels.AdditiveStructureKernel(kernels.RBFKernel(batch_shape=torch.Size([3])), num_dims=3),
            "AdditiveStructureKernel .* with a kernel of its own for each dimension",
        ),
        (
            lambda: (
                kernels.MultitaskKernel(kernels.RBFKernel(), 2) * kernels.MultitaskKernel(kernels.MaternKernel(), 2)
            ),
            "RBFKernel .* as a factor of a product of several tasks",
        ),
    ],
)
def test_where_a_kernel_has_no_features(make_kernel: Callable, where: str) -> None:
    kernel, (x, _) = make_kernel(), data(10)
    with pytest.raises(SpectralDensityMissingError, match=where):
        RandomFourierFeatures(10).draw(kernel_terms(kernel.double()(x)), torch.Generator())


def test_number_of_frequencies() -> None:
    with pytest.raises(ValueError, match="num_frequencies"):
        RandomFourierFeatures(0)

"""Features: their covariance is the kernel's, blocks are parts of the whole, hyperparameters have gradients."""

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.errors import SpectralDensityMissingError
from gpy_iterative.models import (
    FeatureBasis,
    InducingPointBasis,
    NystromBasis,
    RandomFourierBasis,
    RelevanceVectorBasis,
)
from tests.quadruply.weight_space import quasi_normal


def inputs(n: int = 12, d: int = 2) -> Tensor:
    return quasi_normal(n, d, root=2.0)


def rbf(d: int | None = 2) -> kernels.ScaleKernel:
    kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=d)).double()
    kernel.outputscale = 1.7
    return kernel


def all_features(basis: FeatureBasis, x: Tensor) -> Tensor:
    head = basis.head_features(x)
    return torch.cat([head, basis.group_features(x, head, torch.arange(basis.num_groups))], dim=-1)


KERNELS = {
    "rbf": rbf,
    "matern": lambda: kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=2)).double(),
    "sum": lambda: (rbf() + kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, active_dims=(1,)))).double(),
    "product": lambda: kernels.ScaleKernel(
        kernels.RBFKernel(active_dims=(0,)) * kernels.RBFKernel(active_dims=(1,))
    ).double(),
    "active dims": lambda: kernels.ScaleKernel(kernels.RBFKernel(active_dims=(1,))).double(),
    "unscaled": lambda: kernels.RBFKernel().double(),
}


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize("stored", [True, False])
def test_random_features_have_the_kernel_as_covariance(name: str, stored: bool) -> None:
    kernel, x = KERNELS[name](), inputs()
    basis = RandomFourierBasis(kernel, 40_000, num_dims=2, store_frequencies=stored)
    with torch.no_grad():
        phi, exact = all_features(basis, x), kernel(x).to_dense()
        assert (phi @ phi.mT - exact).abs().max() < 0.05 * exact.max()
        variance = basis.group_prior_variance(x, x[:, :0])
        torch.testing.assert_close(phi.square().sum(-1), variance)  # exactly, for any number of features
        torch.testing.assert_close(variance, exact.diagonal())


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("name", ["rbf", "sum"])
def test_a_block_of_groups_is_a_part_of_all(name: str, stored: bool) -> None:
    basis = RandomFourierBasis(KERNELS[name](), 20_000, num_dims=2, store_frequencies=stored)
    x = inputs()
    groups = (torch.arange(7) * 4099 + 3) % basis.num_groups  # of several chunks of seeds, not in order
    every = all_features(basis, x)
    columns = torch.empty_like(every)
    columns[:, basis.feature_index(torch.arange(basis.num_groups))] = every
    part = basis.group_features(x, x[:, :0], groups)
    torch.testing.assert_close(part, columns[:, basis.feature_index(groups)])
    assert len(basis.feature_index(groups).unique()) == part.shape[-1]


def test_seeds_choose_the_frequencies() -> None:
    x = inputs()
    first, again, other = (all_features(RandomFourierBasis(rbf(), 20, seed=s), x) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_neighbouring_seeds_share_no_frequencies() -> None:
    x, groups = inputs(), torch.arange(3 * 4096)
    first, second = (
        RandomFourierBasis(rbf(), 2 * len(groups), seed=s, store_frequencies=False).group_features(x, x[:, :0], groups)
        for s in (1, 2)
    )
    assert len(torch.cat([first, second], dim=-1)[:3].unique(dim=-1).mT) == 4 * len(groups)


def test_frequencies_travel_in_the_state_dict_or_not_at_all() -> None:
    stored, regenerated = (RandomFourierBasis(rbf(), 10_000, store_frequencies=s) for s in (True, False))
    assert any("normal" in name for name in stored.state_dict())
    assert sum(t.numel() for t in regenerated.state_dict().values()) < 10


@pytest.mark.parametrize("stored", [True, False])
def test_a_loaded_state_brings_its_frequencies(stored: bool) -> None:
    x = inputs()
    first, second = (RandomFourierBasis(rbf(), 20, seed=s, store_frequencies=stored) for s in (1, 2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(all_features(second, x), all_features(first, x))


def nystrom_kernel(kernel: kernels.Kernel, points: Tensor, x: Tensor) -> Tensor:
    cross = kernel(x, points).to_dense()
    return cross @ torch.linalg.solve(kernel(points).to_dense(), cross.mT)


def test_the_nystrom_head_is_the_nystrom_approximation_also_when_hyperparameters_move() -> None:
    kernel, x = rbf(), inputs(30)
    basis = NystromBasis(kernel, x[:8])
    for lengthscale in (0.7, 0.9):
        kernel.base_kernel.lengthscale = lengthscale
        for context in (torch.no_grad(), torch.enable_grad()):
            with context:
                head = basis.head_features(x)
                torch.testing.assert_close(head @ head.mT, nystrom_kernel(kernel, x[:8], x), rtol=1e-6, atol=1e-6)
    made_now = NystromBasis(kernel, x[:8]).head_features(x)
    gram = made_now[:8].mT @ made_now[:8]
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-6, rtol=0)  # orthogonal at the points
    assert (gram.diagonal().diff() <= 0).all()


def test_head_and_tail_together_are_the_kernel() -> None:
    kernel, x = rbf(), inputs(15)
    basis = NystromBasis(kernel, x[:5], 60_000)
    with torch.no_grad():
        head = basis.head_features(x)
        tail = basis.group_features(x, head, torch.arange(basis.num_groups))
        rest = kernel(x).to_dense() - head @ head.mT
        torch.testing.assert_close(basis.group_prior_covariance(x, head), rest)
        torch.testing.assert_close(basis.group_prior_variance(x, head), rest.diagonal().clamp_min(0))
        assert (tail @ tail.mT - rest).abs().max() < 0.05 * 1.7
        assert tail[:5].abs().max() < 1e-4  # nothing is left at the points


def test_gradients_of_all_bases() -> None:
    x = inputs()
    for make in (
        lambda k: RandomFourierBasis(k, 6),
        lambda k: NystromBasis(k, x[:4], 4),
        lambda k: InducingPointBasis(k, x[:4]),
        lambda k: RelevanceVectorBasis(k, x[:4]),
    ):
        kernel = rbf()
        basis = make(kernel)

        def features(
            raw: Tensor, where: Tensor, basis: FeatureBasis = basis, kernel: kernels.Kernel = kernel
        ) -> Tensor:
            return torch.func.functional_call(Whole(basis), {"basis.kernel.base_kernel.raw_lengthscale": raw}, (where,))

        raw = kernel.base_kernel.raw_lengthscale.detach().clone().requires_grad_()
        assert torch.autograd.gradcheck(features, (raw, x.clone().requires_grad_()), atol=1e-4)


class Whole(torch.nn.Module):
    """All features of a basis, as a function of named parameters."""

    def __init__(self, basis: FeatureBasis) -> None:
        super().__init__()
        self.basis = basis

    def forward(self, x: Tensor) -> Tensor:
        return all_features(self.basis, x)


def test_precisions_of_relevance_vectors() -> None:
    basis = RelevanceVectorBasis(rbf(), inputs(5), max_precision=50.0)
    mean, variance = torch.tensor([0.0, 1.0, 2.0, 0.1, 0.01]).double(), torch.full((5,), 0.01).double()
    with torch.no_grad():
        basis.log_precision.copy_(-(mean.square() + variance).log().unsqueeze(-1))
    precision = basis.precision
    basis.update_precision(mean, variance)
    mackay = ((1 - precision * variance) / mean.square()).clamp(1e-10, 1e12)
    mackay[0] = precision[0]  # 1 - precision * variance = 0: nothing is known of it
    torch.testing.assert_close(basis.precision, mackay)
    assert basis.relevant().tolist() == (mackay < 50).nonzero().squeeze(-1).tolist()
    with pytest.raises(ValueError, match=r"must be \(5,\)"):
        basis.update_precision(mean[:3], variance)


def test_irrelevant_functions_stay_so_in_single_precision() -> None:
    # Where nothing is left of 1 - s variance but rounding, that is no sign of relevance.
    basis = RelevanceVectorBasis(rbf().float(), inputs(4).float())
    for precision in (1.0, 1e8, 1e12):
        with torch.no_grad():
            basis.log_precision.fill_(torch.tensor(precision).log().item())
        variance = 1 / (basis.precision + (1.0 if precision > 1 else 0.0))
        basis.update_precision(1e-9 * torch.ones(4), variance)
        assert (basis.precision >= 0.999 * precision).all()


def test_what_bases_refuse() -> None:
    x = inputs()
    with pytest.raises(ValueError, match="multiple of 2"):
        RandomFourierBasis(rbf(), 7)
    with pytest.raises(ValueError, match="num_dims"):
        RandomFourierBasis(rbf(None), 8)
    with pytest.raises(ValueError, match="at least 1"):
        RandomFourierBasis(rbf(), 0)
    with pytest.raises(ValueError, match="batch shape"):
        RandomFourierBasis(kernels.RBFKernel(ard_num_dims=2, batch_shape=torch.Size([3])), 8)
    with pytest.raises(SpectralDensityMissingError, match="PeriodicKernel"):
        RandomFourierBasis(kernels.PeriodicKernel(ard_num_dims=2), 8)
    with pytest.raises(SpectralDensityMissingError, match="NystromBasis without a tail"):
        RandomFourierBasis(kernels.LinearKernel(ard_num_dims=2), 8)
    with pytest.raises(ValueError, match="inputs with 2 columns, got 3"):
        RandomFourierBasis(rbf(), 8).group_features(inputs(d=3), x[:, :0], torch.arange(2))
    with pytest.raises(ValueError, match="distinct"):
        InducingPointBasis(rbf(), x[[0, 1, 1]])
    bad = x.clone()
    bad[3, 1] = torch.nan
    for make in (InducingPointBasis, NystromBasis, RelevanceVectorBasis):
        with pytest.raises(ValueError, match=r"points\[3, 1\] is nan"):
            make(rbf(), bad)
        with pytest.raises(ValueError, match="dtype"):
            make(rbf(), x.float())
        with pytest.raises(ValueError, match=r"\[m, d\]"):
            make(rbf(), x[:, 0])
    with pytest.raises(ValueError, match="multiple of 2"):
        NystromBasis(rbf(), x, 3)
    with pytest.raises(ValueError, match="max_precision"):
        RelevanceVectorBasis(rbf(), x, max_precision=0.0)


def test_bases_follow_conversions() -> None:
    x = inputs()
    for make in (
        lambda k: RandomFourierBasis(k, 8),
        lambda k: NystromBasis(k, x[:4], 4),
        lambda k: InducingPointBasis(k, x),
    ):
        basis = make(rbf())
        with torch.no_grad():
            before = all_features(basis, x)
            after = all_features(basis.float(), x.float())
        assert after.dtype == torch.float32
        torch.testing.assert_close(after.double(), before, rtol=1e-3, atol=1e-4)


def test_eigenvectors_keep_their_digits_in_conversions() -> None:
    """A run that goes on in a new process converts a new model as the first one was, and loads its state."""
    x = inputs().float()
    kernel = rbf().float().requires_grad_(False)
    first, second = NystromBasis(kernel, x), NystromBasis(kernel, x.flip(0)).float()
    rotation, features = first.rotation, first.head_features(x)
    first.float()
    first.settle()
    second.load_state_dict(first.state_dict())
    for basis in (first, second):
        assert torch.equal(basis.rotation, rotation)
        assert torch.equal(basis.head_features(x), features)


def test_what_is_kept_is_forgotten_by_loading() -> None:
    # Other points at equal hyperparameters.
    x = inputs(16)
    for make in (NystromBasis, InducingPointBasis):
        first, second = (make(rbf().requires_grad_(False), points) for points in x.split(8))
        evaluate = lambda basis: basis.head_features(x) if basis.has_diagonal_prior else basis.prior_log_determinant()
        before = evaluate(second)
        second.load_state_dict(first.state_dict())
        torch.testing.assert_close(evaluate(second), evaluate(first))
        assert not torch.allclose(evaluate(second), before)


def test_what_is_kept_in_inference_mode_serves_gradients() -> None:
    x = inputs()
    basis = NystromBasis(rbf().requires_grad_(False), x[:4])
    with torch.inference_mode():
        expected = basis.head_features(x).sum().item()
    z = x.clone().requires_grad_()
    value = basis.head_features(z).sum()
    value.backward()
    assert value.item() == pytest.approx(expected)
    assert z.grad.abs().max() > 0


class Warped(kernels.RBFKernel):
    """A kernel with a layer, which takes its own dtype alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        torch.nn.init.eye_(self.layer.weight)

    def forward(self, x1: Tensor, x2: Tensor, **params: object) -> Tensor:
        return super().forward(self.layer(x1), self.layer(x2), **params)


def test_kernels_with_layers_of_single_precision() -> None:
    x, kernel = inputs().float(), Warped()
    head = NystromBasis(kernel, x[:5]).head_features(x)
    head.square().sum().backward()
    assert kernel.layer.bias.grad is not None
    assert kernel.layer.weight.dtype == torch.float32
    assert kernel.layer.weight.grad.abs().max() > 0
    torch.testing.assert_close(head @ head.mT, nystrom_kernel(kernel, x[:5], x), rtol=1e-3, atol=1e-3)
    assert InducingPointBasis(kernel, x).prior_log_determinant().dtype == torch.float32


class Exponential(kernels.Kernel):
    """A kernel without parameters."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: object) -> Tensor:
        return x1.new_ones(len(x1)) if diag else torch.exp(-torch.cdist(x1, x2))


def test_kernels_without_parameters() -> None:
    x = inputs()
    with torch.no_grad():
        head = NystromBasis(Exponential(), x[:5]).head_features(x)
    torch.testing.assert_close(head @ head.mT, nystrom_kernel(Exponential(), x[:5], x))


def test_unregistered_structures_are_bases_too() -> None:
    periodic = gpytorch.kernels.PeriodicKernel().double()
    basis = gpi.models.NystromBasis(periodic, inputs(6))
    assert basis.num_features == basis.num_head_features


@pytest.mark.parametrize("make", [InducingPointBasis, NystromBasis])
def test_kernels_that_keep_matrices_follow_their_hyperparameters(make: type[FeatureBasis]) -> None:
    """GPyTorch's kernel of inducing points keeps matrices in evaluation mode: features neither read nor leave any."""
    base, x = rbf(), inputs()
    kernel = kernels.InducingPointKernel(base, inputs(5), gpytorch.likelihoods.GaussianLikelihood()).double().eval()
    basis = make(kernel, x[:4])

    def features() -> list[Tensor]:
        with torch.no_grad():
            if make is InducingPointBasis:
                return [basis.prior_precision(torch.arange(4)), basis.group_features(x, x[:, :0], torch.arange(4))]
            head = basis.head_features(x)
            return [head, basis.group_prior_variance(x, head)]

    features()
    base.base_kernel.lengthscale = 0.3
    after = features()
    assert not any(name.startswith("_cached") for name in vars(kernel))
    kernel.train()
    kernel.eval()
    for found, wanted in zip(after, features(), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("sparse", [True, False])
def test_precisions_have_the_gradients_that_are_asked_for(sparse: bool) -> None:
    points = torch.linspace(0, 1, 6).unsqueeze(-1)
    basis = RelevanceVectorBasis(kernels.RBFKernel().requires_grad_(False), points, sparse_gradients=sparse)
    basis.prior_precision(torch.tensor([1, 3])).sum().backward()
    assert basis.log_precision.grad.is_sparse == sparse

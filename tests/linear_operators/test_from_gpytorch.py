"""Which operator stands for which prior, and what it leaves unevaluated."""

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.operators import (
    DenseLinearOperator,
    KroneckerProductLinearOperator,
    MaskedLinearOperator,
    SumBatchLinearOperator,
    SumLinearOperator,
)

from gpy_iterative.errors import ApproximationWarning
from gpy_iterative.kernels import MatrixFreeKernel
from gpy_iterative.linear_operators import (
    GenericKernelLinearOperator,
    KernelProducts,
    RadialKernelLinearOperator,
    kernel_operator,
    noisy_operator,
)
from gpy_iterative.linear_operators.tiles.cache import TileCache
from tests.exact.gaussian_models import CASES, Regression, data

PRODUCTS = KernelProducts(tile_size=16)


def operator_for(kernel: kernels.Kernel) -> torch.Tensor:
    x, _ = data(20)
    return kernel_operator(kernel.double()(x), PRODUCTS)


def test_which_operator_stands_for_which_kernel() -> None:
    assert isinstance(operator_for(kernels.ScaleKernel(kernels.MaternKernel(nu=2.5))), RadialKernelLinearOperator)
    assert isinstance(operator_for(kernels.keops.RBFKernel()), RadialKernelLinearOperator)
    assert isinstance(operator_for(kernels.PeriodicKernel()), RadialKernelLinearOperator)
    assert isinstance(operator_for(kernels.CosineKernel()), GenericKernelLinearOperator)
    assert isinstance(operator_for(kernels.RBFKernel() + kernels.MaternKernel()), SumLinearOperator)
    # Subclasses of the radial kernels that compute something else
    for kernel in (kernels.RBFKernelGrad(), kernels.Matern52KernelGrad()):
        assert isinstance(operator_for(kernel), GenericKernelLinearOperator)

    class Subclass(kernels.RBFKernel):
        """Adds nothing to the computation."""

    class Override(kernels.RBFKernel):
        def forward(self, x1, x2, diag=False, **params):
            return 2 * super().forward(x1, x2, diag=diag, **params)

    assert isinstance(operator_for(Subclass()), RadialKernelLinearOperator)

    class OtherSmoothness(kernels.MaternKernel):
        def forward(self, x1, x2, diag=False, **params):
            return kernels.RBFKernel.forward(self, x1, x2, diag=diag)

    other = OtherSmoothness()
    other.nu = 3.5
    for kernel in (Override(), other):
        assert isinstance(operator_for(kernel), GenericKernelLinearOperator)


def grid_kernel(**options) -> kernels.Kernel:
    return kernels.GridInterpolationKernel(kernels.RBFKernel(), grid_size=8, num_dims=3, **options).double()


def test_inputs_outside_of_a_fixed_grid_are_named() -> None:
    x, _ = data(20)
    kernel = kernels.ScaleKernel(grid_kernel(grid_bounds=[(-2.2, 2.2)] * 3)).double()
    kernel_operator(kernel(x), PRODUCTS)
    with pytest.raises(ValueError, match=r"from -?\d.* to 5 \(dimension 1\) .* grid_bounds"):
        kernel_operator(kernel(x, x.index_fill(1, torch.tensor([1]), 5.0)), PRODUCTS)


def test_a_grid_that_follows_its_inputs_is_refused_in_blocks() -> None:
    """Every block would have a grid of its own; in sums and scales the kernel is evaluated at all inputs at once."""
    x, _ = data(20)
    kernel_operator((grid_kernel() + kernels.ScaleKernel(grid_kernel())).double()(x), PRODUCTS)
    kernel = grid_kernel() * kernels.PeriodicKernel().double()
    with pytest.raises(ValueError, match=r"ProductKernel .* grid_bounds"):
        kernel_operator(kernel(x), PRODUCTS)
    assert not kernel.kernels[0].has_initialized_grid


def test_scale_of_scale_folds_into_one_outputscale() -> None:
    kernel = kernels.ScaleKernel(kernels.ScaleKernel(kernels.RBFKernel()))
    operator = operator_for(kernel)
    assert isinstance(operator, RadialKernelLinearOperator)
    torch.testing.assert_close(operator.outputscale, kernel.outputscale * kernel.base_kernel.outputscale)


def test_multitask_keeps_its_kronecker_structure() -> None:
    case = CASES["multitask"]()
    operator = noisy_operator(case.likelihood, case.model(case.x), products=PRODUCTS)
    assert isinstance(operator.kernel, KroneckerProductLinearOperator)
    assert isinstance(operator.kernel.linear_ops[0], RadialKernelLinearOperator)


def test_one_task_equals_a_single_output() -> None:
    kernel, (x, _) = kernels.MultitaskKernel(kernels.MaternKernel(), num_tasks=1, rank=0).double(), data(10)  # one tile
    torch.testing.assert_close(kernel_operator(kernel(x), PRODUCTS).to_dense(), kernel(x).to_dense())


@pytest.mark.parametrize("width", [1, 2])
def test_lengthscales_for_other_columns_are_refused(width: int) -> None:
    x = data(20)[0][:, :1].expand(20, width)
    kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3)).double()
    with pytest.raises(ValueError, match=rf"RBFKernel has ard_num_dims=3.*\(20, {width}\): set ard_num_dims={width}"):
        kernel_operator(kernel(x), PRODUCTS)


def test_dtype_of_inputs_and_parameters_must_agree() -> None:
    x, _ = data(20)
    with pytest.raises(ValueError, match=r"float64.*raw_lengthscale.*float32"):
        kernel_operator(kernels.RBFKernel()(x), PRODUCTS)


@pytest.mark.parametrize("base", [kernels.RBFKernel, kernels.MaternKernel])
def test_integers_are_centred_before_they_are_rounded(base: type[kernels.Kernel]) -> None:
    """float32 has one number in 128 near time stamps of today."""
    stamps = 1_700_000_000 + 60 * torch.arange(40).unsqueeze(-1)
    kernel = base()
    kernel.lengthscale = 600.0
    since_start = (stamps - stamps[0]).float()
    for columns in (slice(None), slice(5, 30)):
        found = kernel_operator(kernel(stamps, stamps[columns]), PRODUCTS)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.to_dense(), kernel(since_start, since_start[columns]).to_dense())


def test_an_outlier_does_not_round_the_other_inputs() -> None:
    x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    x[0] = 1e6
    kernel = kernels.RBFKernel()
    found = kernel_operator(kernel(x), PRODUCTS).to_dense()
    exact = kernel_operator(kernel.double()(x.double()), PRODUCTS).to_dense()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert kernel_operator(kernel(x.double(), x[:0].double()), PRODUCTS).to_dense().shape == (300, 0)


def test_checkpointing_is_refused() -> None:
    with (
        pytest.warns(DeprecationWarning, match="checkpointing"),
        gpytorch.beta_features.checkpoint_kernel(10),
        pytest.raises(RuntimeError, match="checkpoint_kernel"),
    ):
        operator_for(kernels.RBFKernel())


def test_cross_covariances_are_slices_of_the_joint_one() -> None:
    x, y = data(30)
    model = Regression(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernels.RBFKernel()).double()
    joint = kernel_operator(model.covar_module(x), PRODUCTS)
    cross = joint[20:, :20]
    assert isinstance(cross, RadialKernelLinearOperator)
    with torch.no_grad():
        torch.testing.assert_close(cross.to_dense(), model.covar_module(x[20:], x[:20]).to_dense())


def test_tiles_are_kept_under_the_path_of_their_kernel() -> None:
    cache, x = TileCache(), torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    product = kernels.ScaleKernel(kernels.PeriodicKernel()) * kernels.RBFKernel()
    kernel = kernels.RBFKernel() + kernels.ScaleKernel(kernels.CosineKernel()) + kernels.ScaleKernel(product)
    total = kernel_operator(kernel(x), KernelProducts(), cache)
    radial, generic, of_product = total.linear_ops
    assert radial.cache is cache.part("0")
    assert generic.base_linear_op.cache is cache.part("1")
    assert of_product.cache is cache.part("2")


def test_caches_are_shared_by_the_steps_of_a_run_and_share_a_budget() -> None:
    x, _ = data(40)
    kernel = (kernels.RBFKernel() + kernels.MaternKernel()).double()
    cache = TileCache()
    rhs = torch.ones(40, 1).double()
    budget = KernelProducts(tile_size=8, cache_memory=20 * 8 * 8 * 8)
    for _ in range(2):
        operator = kernel_operator(kernel(x), budget, cache)
        with torch.no_grad():
            torch.testing.assert_close(operator._matmul(rhs), kernel(x).to_dense() @ rhs)
        assert cache.pool.num_bytes() == budget.cache_memory
        kernel.kernels[0].lengthscale = 0.4
    cache.clear()
    assert cache.pool.num_bytes() == 0


def test_compositions_of_lazy_kernels_stay_free_of_their_matrices() -> None:
    x, _ = data(20)
    shape = torch.Size([3])
    kernel = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=shape), batch_shape=shape).double()
    summed = kernel_operator(kernel(x.mT.unsqueeze(-1)).sum(-3), PRODUCTS)
    assert isinstance(summed, SumBatchLinearOperator)
    assert isinstance(summed.base_linear_op, RadialKernelLinearOperator)
    mask = torch.arange(20) < 7
    masked = kernel_operator(MaskedLinearOperator(kernel(x), mask, mask), PRODUCTS)
    assert isinstance(masked.base, RadialKernelLinearOperator)


def test_a_product_over_a_batch_has_the_memory_of_one_matrix() -> None:
    """A training step of 400 rows took 12 s, not .1, and memory grew with the cube of the rows."""
    x, _ = data(20)
    by_dimension = x.mT.unsqueeze(-1)
    kernel = kernels.RBFKernel(batch_shape=torch.Size([len(by_dimension)])).double()
    kernel.lengthscale = 0.1  # longer ones make singular factors, for which GPyTorch warns on some processors
    expected = kernel(by_dimension).to_dense().prod(-3)
    mask = torch.arange(20) < 7
    whole = kernel_operator(kernel(by_dimension).prod(-3), PRODUCTS)
    masked = kernel_operator(MaskedLinearOperator(kernel(by_dimension).prod(-3), mask, mask), PRODUCTS)
    for found, matrix in ((whole, whole), (masked.base, masked)):
        assert isinstance(found, DenseLinearOperator)
        wanted = expected[: matrix.shape[-1], : matrix.shape[-1]]
        torch.testing.assert_close(matrix.to_dense(), wanted, atol=1e-5, rtol=0)
        (gradient,) = torch.autograd.grad(matrix.to_dense().sum(), kernel.raw_lengthscale, retain_graph=True)
        (truth,) = torch.autograd.grad(wanted.sum(), kernel.raw_lengthscale, retain_graph=True)
        torch.testing.assert_close(gradient, truth, atol=1e-3, rtol=1e-4)
    linear = kernels.LinearKernel().double()
    assert not isinstance(kernel_operator(linear(x[:, :1]).mul(linear(x[:, :1])), PRODUCTS), DenseLinearOperator)


def test_a_product_that_gpytorch_approximates_warns() -> None:
    x, _ = data(20)
    kernel = kernels.RBFKernel(batch_shape=torch.Size([3])).double()
    with gpytorch.settings.max_cholesky_size(19):
        product = kernel(x[:, :1].expand(3, 20, 1)).prod(-3)
        with pytest.warns(ApproximationWarning, match="max_cholesky_size above the 20 rows"):
            kernel_operator(product, PRODUCTS)


def test_multitask_kernels_overlook_active_dims_as_gpytorch_does() -> None:
    x, _ = data(10)
    kernel = kernels.MultitaskKernel(kernels.RBFKernel(active_dims=(0,)), num_tasks=2).double()
    with torch.no_grad():
        torch.testing.assert_close(kernel_operator(kernel(x), PRODUCTS).to_dense(), kernel(x).to_dense())


def test_several_outputscales_share_a_kernel_without_its_matrix() -> None:
    x, _ = data(20)
    for base in (kernels.RBFKernel(), kernels.PeriodicKernel()):
        kernel = kernels.ScaleKernel(base, batch_shape=torch.Size([2])).double()
        kernel.outputscale = torch.tensor([0.5, 2.0])
        operator = kernel_operator(kernel(x), PRODUCTS)
        assert not isinstance(operator, DenseLinearOperator)
        with torch.no_grad():
            torch.testing.assert_close(
                operator @ torch.ones(20, 1).double(), kernel(x).to_dense().sum(-1, keepdim=True)
            )


@pytest.mark.parametrize("base", [kernels.RBFKernel, kernels.PeriodicKernel])
def test_equal_inputs_keep_gradients_of_their_own(base: type[kernels.Kernel]) -> None:
    x, _ = data(8)
    kernel, weights = MatrixFreeKernel(base()).double(), torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for own in (kernel, kernel.base_kernel):
        x2 = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((own(x, x2).to_dense() * weights).sum(), x2)
        found.append(gradient)
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("inputs_learned", [False, True])
def test_gradients_of_inputs_are_whole_where_inputs_are_learned(inputs_learned: bool) -> None:
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_(inputs_learned)
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = torch.tensor([[0.8, 1.7]])
    operator = kernel_operator(kernel(x), PRODUCTS)
    left, right = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [kernel.base_kernel.raw_lengthscale, *([x] if inputs_learned else [])]
    found = torch.autograd.grad((left * (operator @ right)).sum(), leaves)
    expected = torch.autograd.grad((left * (kernel(x).to_dense() @ right)).sum(), leaves)
    torch.testing.assert_close(found, expected)

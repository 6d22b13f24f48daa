"""Every refusal names its reason, and leaves parameters, generator and control state as they were."""

import pickle
import warnings
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.errors import DataWarning, NonFiniteError, SpectralDensityMissingError, UnsupportedLikelihoodError
from gpy_iterative.mlls import QuadruplyStochasticELBO
from gpy_iterative.models import (
    InducingPointBasis,
    NystromBasis,
    QuadruplyStochasticGP,
    QuadruplyStochasticOptimizer,
    RandomFourierBasis,
    RelevanceVectorBasis,
)
from tests.quadruply.quadruply_models import fourier_problem, gaussian_likelihood, known_latent

OPTIONS = {"num_feature_samples": 20, "num_data_samples": 30, "num_control_points": 20, "generator": 0}


def make(**options):
    model, x, y = fourier_problem()
    return QuadruplyStochasticELBO(gaussian_likelihood(0.2), model, **(OPTIONS | options)), model, x, y


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_feature_samples": 42}, "at most 40"),
        ({"num_feature_samples": 7}, "multiple of 2"),
        ({"num_feature_samples": 0}, "at least 1"),
        ({"num_data_samples": 0}, "at least 1"),
        ({"num_data": 20}, "at most num_data = 20"),
        ({"num_data": 1.5}, "whole number"),
        ({"num_control_points": -1}, "num_control_points must be at least 0"),
        ({"num_steps_per_batch": 0}, "num_steps_per_batch must be at least 1"),
        ({"num_steps_per_batch": 2}, "num_control_points=0"),
    ],
)
def test_options_outside_their_range(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_parts_of_another_type() -> None:
    model = make()[1]
    for call, message in (
        (lambda: make(sparse_gradients=3), "sparse_gradients must be True or False, got 3"),
        (lambda: QuadruplyStochasticGP(model.basis, num_dense_columns=-1), "at least 0, got -1"),
        (lambda: RandomFourierBasis(kernels.RBFKernel(), 4, store_frequencies=3), "store_frequencies must be True"),
        (
            lambda: RelevanceVectorBasis(kernels.RBFKernel(), torch.rand(3, 2), sparse_gradients=3),
            "sparse_gradients must",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: NystromBasis("rbf", torch.rand(3, 2)), "needs a gpytorch.kernels.Kernel, got 'rbf'"),
        (lambda: RandomFourierBasis(3, 4), "needs a gpytorch.kernels.Kernel, got 3"),
        (lambda: QuadruplyStochasticOptimizer(make()[0], num_data=3, num_steps=3), "got QuadruplyStochasticELBO"),
        (lambda: QuadruplyStochasticOptimizer(model, 0.1, num_data=3, num_steps=3), "likelihood must be .*got 0.1"),
    ):
        with pytest.raises(TypeError, match=message):
            call()


@pytest.mark.parametrize(
    "make_basis", [NystromBasis, InducingPointBasis, lambda kernel, _: RandomFourierBasis(kernel, 4)]
)
def test_kernels_of_several_outputs(make_basis: Any) -> None:
    """The first step had an error about shapes."""
    for kernel in (
        kernels.MultitaskKernel(kernels.RBFKernel(ard_num_dims=2), 3),
        kernels.RBFKernelGrad(ard_num_dims=2),
    ):
        with pytest.raises(
            ValueError, match=f"one output, and {type(kernel).__name__} has several: .* with Hutchinson"
        ):
            make_basis(kernel, torch.rand(5, 2))


@pytest.mark.parametrize("kernel", [kernels.LinearKernel(), kernels.RBFKernel() * kernels.LinearKernel()])
def test_kernels_without_random_features_are_told_a_basis_that_takes_them(kernel: kernels.Kernel) -> None:
    """Such kernels have few features, so the points' kernel matrix is singular, which an InducingPointBasis inverts."""
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(SpectralDensityMissingError, match="NystromBasis without a tail"):
        RandomFourierBasis(kernel, 4, num_dims=2)
    head = NystromBasis(kernel, x).head_features(x)
    torch.testing.assert_close(head @ head.mT, kernel(x).to_dense(), rtol=1e-3, atol=1e-4)


def test_pytorch_does_not_warn_of_the_optimisers_sparse_gradients() -> None:
    mll, model, x, y = make()
    optimizer = QuadruplyStochasticOptimizer(model, mll.likelihood, num_data=60, num_steps=2)
    (-mll(model(x), y)).backward()
    torch.set_warn_always(True)  # else once in a process
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
    finally:
        torch.set_warn_always(False)
    assert not found


def test_sizes_beyond_the_data() -> None:
    mll, model, x, y = make(num_data_samples=61)
    with pytest.raises(ValueError, match="num_data_samples must be at most 60"):
        mll(model(x), y)
    mll, model, x, y = make(num_control_points=61)
    with pytest.raises(ValueError, match="num_control_points must be at most 60"):
        mll(model(x), y)
    mll, model, x, y = make(num_data=50)
    with pytest.raises(ValueError, match="num_data is 50, but 60 rows"):
        mll(model(x), y)


def test_other_data_without_num_data() -> None:
    mll, model, x, y = make()
    mll(model(x), y)
    mll(model(x.clone()), y.clone())
    for rows in (slice(0, 40), torch.arange(60).flip(0)):
        with pytest.raises(ValueError, match=r"num_data=len\(train_x\)"):
            mll(model(x[rows]), y[rows])
    again, its_model, *_ = make()
    again.load_training_state(mll.training_state())
    for one in (mll, again):
        with pytest.raises(ValueError, match="or their targets are others"):
            one(one.model(x), y.flip(0))
    again(its_model(x), y)


@pytest.mark.parametrize("make_basis", [NystromBasis, InducingPointBasis])
def test_inputs_with_other_columns_than_the_points(make_basis: type[NystromBasis | InducingPointBasis]) -> None:
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=3).double().requires_grad_(False)
    x = torch.rand(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = QuadruplyStochasticGP(make_basis(kernel, x[:10]))
    mll = QuadruplyStochasticELBO(gaussian_likelihood(0.2), model, num_data=30, generator=0)
    with pytest.raises(ValueError, match="made for inputs with 3 columns, got 2"):
        mll(model(x[:, :2]), x[:, 0])
    with pytest.raises(ValueError, match="made for inputs with 3 columns, got 2"):
        model.eval()(x[:, :2])


@pytest.mark.parametrize("bad", [0.0, -0.1, torch.nan, torch.inf])
def test_noise_variances_that_are_none(bad: float) -> None:
    mll, model, x, y = make(num_data_samples=60)
    noise = torch.full_like(y, 0.2)
    noise[7] = bad
    with pytest.raises(ValueError, match=f"must be finite and positive, but one is {bad}"):
        mll(model(x), y, noise=noise)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_data_that_are_not_finite(bad: float) -> None:
    mll, model, x, y = make()
    mll(model(x), y)
    before = mll.training_state()
    broken = y.clone()
    broken[7] = bad
    with pytest.raises(ValueError, match=r"target\[7\] is (nan|inf)"):
        mll(model(x), broken)
    z = x.clone()
    z[4, 1] = bad
    with pytest.raises(ValueError, match=r"x\[4, 1\] is (nan|inf)"):
        mll(model(z), y)
    x[30, 0] = bad  # in place, in data that were seen
    with pytest.raises(ValueError, match=r"x\[30, 0\] is (nan|inf)"):
        mll(model(x), y)
    after = mll.training_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_data_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=1).double()
    x, y = torch.linspace(0, 1, 30).double().unsqueeze(-1), torch.ones(30).double()
    model = QuadruplyStochasticGP(gpi.models.RandomFourierBasis(kernel, 10))
    mll = QuadruplyStochasticELBO(gaussian_likelihood(0.2), model, num_data=30, generator=0)
    seen = []
    monkeypatch.setattr("gpy_iterative.quadruply.sizes.check_finite", lambda name, tensor: seen.append(name))
    for _ in range(2):
        mll(model(x), y)
    assert seen == ["x", "target"]
    for part in (slice(0, 10), slice(10, 20)):
        mll(model(x[part]), y[part])
    assert len(seen) == 6
    y[0] = 2.0
    mll(model(x), y)
    mll(model(x), y)
    assert len(seen) == 8


def test_shapes_and_dtypes() -> None:
    mll, model, x, y = make()
    for target in (y[:-1], y.unsqueeze(-1), y.tolist(), None):
        with pytest.raises(ValueError, match="The target must be a tensor"):
            mll(model(x), target)
    with pytest.raises(ValueError, match="dtype"):
        mll(model(x), y.float())
    with pytest.raises(ValueError, match="no rows"):
        mll(model(x[:0]), y[:0])


def test_predictions_are_no_training_output() -> None:
    mll, model, x, y = make()
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        mll(model.eval()(x), y)
    other, _, _ = fourier_problem()
    with pytest.raises(ValueError, match="another model"):
        mll(other(x), y)


def test_likelihoods() -> None:
    model, _, _ = fourier_problem()
    student = gpytorch.likelihoods.StudentTLikelihood().double()
    with pytest.raises(UnsupportedLikelihoodError, match="StudentTLikelihood is not known"):
        QuadruplyStochasticELBO(student, model)
    with pytest.raises(UnsupportedLikelihoodError, match="Multitask"):
        QuadruplyStochasticELBO(gpytorch.likelihoods.MultitaskGaussianLikelihood(2), model)
    for batch in (
        gpytorch.likelihoods.GaussianLikelihood(batch_shape=torch.Size([2])),
        gpytorch.likelihoods.DirichletClassificationLikelihood(torch.tensor([0, 1])),  # a model per class
    ):
        with pytest.raises(ValueError, match="batch of models"):
            QuadruplyStochasticELBO(batch, model)
    with pytest.raises(TypeError, match="QuadruplyStochasticGP"):
        QuadruplyStochasticELBO(gaussian_likelihood(0.1), torch.nn.Linear(1, 1))
    logistic = gpi.likelihoods.LogitBernoulliLikelihood()
    with pytest.raises(ValueError, match="num_control_points=0"):
        QuadruplyStochasticELBO(logistic, model, num_control_points=10)


@pytest.mark.parametrize(
    "likelihood", [gpi.likelihoods.LogitBernoulliLikelihood(), gpytorch.likelihoods.BernoulliLikelihood()]
)
def test_labels(likelihood: gpytorch.likelihoods.Likelihood) -> None:
    model, x, y = fourier_problem()
    mll = QuadruplyStochasticELBO(likelihood, model, generator=0)
    with pytest.raises(ValueError, match=r"pass \(target \+ 1\) / 2"):
        mll(model(x), y.sign())
    with pytest.raises(ValueError, match=r"labels must be 0 or 1 .*but targets\[\d+\] is"):
        mll(model(x), y)
    value = mll(model(x), (y > 0).double())
    assert torch.isfinite(value)
    torch.testing.assert_close(mll(model(x), (y > 0).long()), value)  # all data and features: nothing is drawn


def test_every_target_is_looked_at_before_the_first_step() -> None:
    # Not when a sample meets it, hours into a run; and by its own number.
    likelihoods = [
        (gpi.likelihoods.LogitBernoulliLikelihood(), 3.0),
        (gpytorch.likelihoods.PoissonLikelihood(), -1.0),
        (gpi.likelihoods.PoissonLogLikelihood(), 0.5),
    ]
    for likelihood, bad in likelihoods:
        model, x, y = fourier_problem()
        mll = QuadruplyStochasticELBO(likelihood, model, num_data_samples=2, generator=0)
        target = (y > 0).double()
        assert torch.isfinite(mll(model(x), target))
        target[41] = bad
        with pytest.raises(ValueError, match=rf"targets\[41\] is {bad}"):
            mll(model(x), target)
        with pytest.raises(ValueError, match=rf"targets\[41\] is {bad}"):
            mll.exact_value(x, target)


def test_learned_hyperparameters_of_a_dense_prior() -> None:
    _, x, y = fourier_problem()
    kernel = gpytorch.kernels.RBFKernel().double()
    model = QuadruplyStochasticGP(InducingPointBasis(kernel, x))
    mll = QuadruplyStochasticELBO(gaussian_likelihood(0.2), model, generator=0)
    with pytest.raises(ValueError, match=r"requires_grad_\(False\)"):
        mll(model(x), y)
    with pytest.raises(ValueError, match=r"requires_grad_\(False\)"):
        mll.exact_value(x, y)  # its gradient would lack that of log|S|
    kernel.requires_grad_(False)
    assert torch.isfinite(mll(model(x), y))


def test_hyperparameters_that_are_not_finite() -> None:
    mll, model, x, y = make()
    mll(model(x), y)
    before = mll.training_state()
    model.basis.kernel.raw_outputscale.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="raw_outputscale is not finite"):
        mll(model(x), y)
    model.basis.kernel.raw_outputscale.data.fill_(0.5)
    model.weights.tail_mean.data.fill_(1e200)
    report = mll.report
    with pytest.raises(NonFiniteError, match="smaller learning rate"):
        mll(model(x), y)
    assert mll.report is report
    assert torch.equal(mll._run.position, before["generator"])


def test_states_of_other_runs() -> None:
    mll, model, x, y = make()
    mll(model(x), y)
    state = mll.training_state()
    del state["latent.total"]
    with pytest.raises(ValueError, match="no training state"):
        mll.load_training_state(state)


def test_hyperparameters_too_far_from_those_of_the_basis() -> None:
    _, x, _ = fourier_problem()
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = 0.05
    basis = NystromBasis(kernel, x)
    kernel.lengthscale = 50.0
    with torch.no_grad(), pytest.raises(NonFiniteError, match="make a new basis"):
        basis.head_features(x)


def test_a_failed_first_step_leaves_no_trace() -> None:
    mll, model, x, y = make(num_control_points=61)
    before = {name: tensor.clone() for name, tensor in mll.state_dict().items()}
    with pytest.raises(ValueError, match="num_control_points"):
        mll(model(x), y)
    after = mll.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    mll, model, x, y = make()
    state = mll.training_state()
    with pytest.warns(DataWarning, match="standardise the targets"), pytest.raises(NonFiniteError):
        mll(model(x), 1e200 * y)
    assert mll.training_state().keys() == state.keys()  # no control variate
    assert not model.weights.initialized


@pytest.mark.parametrize("points", [20, None])
def test_training_goes_on_after_weights_that_were_no_numbers(points: int | None) -> None:
    model, x, y = fourier_problem(m=2000)
    model.basis.requires_grad_(False)
    options = OPTIONS | {"generator": 3, "num_control_points": points}
    mll = QuadruplyStochasticELBO(gaussian_likelihood(0.2).requires_grad_(False), model, **options)
    optimizer = torch.optim.Adagrad(model.variational_parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()
    before, moved = mll._run, known_latent(mll).sampled
    good = model.weights.tail_mean.detach().clone()
    model.weights.tail_mean.data[moved] = torch.nan
    with pytest.raises(NonFiniteError):
        mll(model(x), y)
    assert mll._run is before
    mll.training_state()  # of what is not finite
    model.weights.tail_mean.data.copy_(good)
    mll(model(x), y)
    total = known_latent(mll).total
    assert torch.isfinite(total).all()
    mll.refresh()
    torch.testing.assert_close(total, known_latent(mll).total)


def test_states_of_other_models() -> None:
    mll, model, x, y = make()
    mll(model(x), y)
    state = mll.training_state()
    other, _, _ = fourier_problem(num_dense_columns=2)
    into = QuadruplyStochasticELBO(gaussian_likelihood(0.2), other, **OPTIONS)
    before = into.training_state()
    with pytest.raises(ValueError, match="number of dense columns is 0 in it and 2 here"):
        into.load_training_state(state)
    with pytest.raises(ValueError, match="no training state"):
        into.load_training_state(state | {"description": before["description"]})
    assert into.training_state().keys() == before.keys()
    isotropic = kernels.ScaleKernel(kernels.RBFKernel()).double()
    basis = RandomFourierBasis(isotropic, 40, seed=1, num_dims=2)
    into = QuadruplyStochasticELBO(gaussian_likelihood(0.2), QuadruplyStochasticGP(basis), **OPTIONS)
    with pytest.raises(ValueError, match=r"basis parameters is .*raw_lengthscale \[1, 2\].*raw_lengthscale \[1, 1\]"):
        into.load_training_state(state)


@pytest.mark.parametrize(
    ("scale", "shift", "sentence"),
    [(1e3, 0.0, "standardise the targets"), (1e-3, 0.0, "standardise the targets"), (1.0, 50.0, "subtract their mean")],
)
def test_the_first_step_warns_of_targets_of_another_scale(scale: float, shift: float, sentence: str) -> None:
    _, model, x, y = make()
    nystrom = QuadruplyStochasticGP(NystromBasis(model.basis.kernel, x[:10]))
    for each in (model.requires_grad_(False), nystrom):
        mll = QuadruplyStochasticELBO(gaussian_likelihood(0.2), each, num_data=60, num_steps_per_batch=1, generator=0)
        with pytest.warns(DataWarning, match=sentence):
            mll(each(x), scale * y + shift)
        mll(each(x), scale * y + shift)
        each.weights.initialized.fill_(0)
        mll(each(x), y)
        each.weights.initialized.fill_(0)
        mll(each(x), torch.zeros_like(y))  # as in a batch of rare events


@pytest.mark.parametrize("columns", [1, 3])
def test_inputs_with_other_columns_than_the_frequencies(columns: int) -> None:
    mll, model, x, y = make()
    others = x[:, :1].expand(-1, columns)
    with pytest.raises(ValueError, match=f"made for inputs with 2 columns, got {columns}"):
        mll(model(others), y)
    with pytest.raises(ValueError, match=f"made for inputs with 2 columns, got {columns}"):
        model.eval()(others)


def test_an_optimiser_that_knows_fewer_data_than_a_step_has_rows() -> None:
    """Such as the number of batches: its steps would be too short by the same factor."""
    _, model, x, y = make()
    model = QuadruplyStochasticGP(NystromBasis(model.basis.kernel, x[:10]))
    mll = QuadruplyStochasticELBO(gaussian_likelihood(0.2), model, num_data_samples=30, generator=0)
    optimizer = QuadruplyStochasticOptimizer(model, mll.likelihood, num_data=3, num_steps=5)
    (-mll(model(x), y)).backward()
    with pytest.raises(ValueError, match="num_data of the optimiser is 3, but a step has 30 rows"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    _, model, x, _ = make()
    with pytest.raises(ValueError, match=rf"need float32 or float64.* {dtype}.*\.float\(\)"):
        model.to(dtype)(x.to(dtype))


def test_pickling_and_conversion() -> None:
    mll, model, x, y = make()
    mll(model(x), y)
    again = pickle.loads(pickle.dumps(mll))
    torch.testing.assert_close(again(again.model(x), y), mll(model(x), y))
    mll.float()
    assert mll(model(x.float()), y.float()).dtype == torch.float32


def test_converting_model_and_likelihood_apart_from_the_objective() -> None:
    model, x, y = fourier_problem()
    x, y, model = x.float(), y.float(), model.float()
    likelihood = gaussian_likelihood(0.2).float()
    mll = QuadruplyStochasticELBO(likelihood, model, **OPTIONS)
    mll(model(x), y)
    model.double()
    likelihood.double()
    assert mll(model(x.double()), y.double()).dtype == torch.float64


def test_rows_that_cannot_be_kept() -> None:
    mll, model, x, y = make(num_control_points=None, num_steps_per_batch=2, num_data=60)
    with pytest.raises(ValueError, match="hyperparameters to be learned"):
        mll(model(x), y)
    model.basis.requires_grad_(False)
    with pytest.raises(ValueError, match="only 30 of 60 data were passed"):
        mll(model(x[:30]), y[:30])
    assert not model.weights.initialized
    mll(model(x), y)
    assert mll.report.num_steps_per_batch == 2


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("index", torch.zeros(30)),
        ("index", torch.zeros(0, dtype=torch.int64)),
        ("index", torch.tensor([3])),
        ("index", torch.zeros(30, 2, dtype=torch.int64)),
        ("count", torch.tensor(5.0)),
    ],
)
def test_states_of_rows_that_are_none(name: str, entry: torch.Tensor) -> None:
    mll, model, x, y = make(num_control_points=None)
    model.basis.requires_grad_(False)
    mll(model(x), y)
    state = mll.training_state()
    before = mll._run
    with pytest.raises(ValueError, match="no training state"):
        mll.load_training_state(state | {f"kept.{name}": entry})
    assert mll._run is before

"""Saved in the middle and resumed in fresh objects, every marginal log likelihood goes on to the last bit."""

import inspect
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

import gpy_iterative as gpi
from gpy_iterative.models import QuadruplyStochasticOptimizer
from gpy_iterative.solvers import AlternatingProjections, ConjugateGradients, LaplaceNewton, StochasticGradientDescent
from gpy_iterative.truncation import AutomaticTruncation, ExponentialTruncation
from tests.exact.gaussian_models import CASES, regression
from tests.features.feature_models import KERNELS, feature_case
from tests.features.test_exact import METHODS
from tests.laplace.cases import Exposed, LaplaceModel, inputs
from tests.laplace.cases import case as laplace_case
from tests.quadruply.quadruply_models import fourier_problem, gaussian_likelihood
from tests.quadruply.weight_space import quasi_normal


@dataclass
class Run:
    """What a user holds while training."""

    mll: Any
    optimizer: Any
    x: Tensor
    y: Tensor

    def train(self, steps: int) -> list[float]:
        """Losses."""
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = -self.mll(self.mll.model(self.x), self.y).sum()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def save(self) -> io.BytesIO:
        """The three parts of a checkpoint, as a file."""
        file = io.BytesIO()
        parts = {"state": self.mll.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(parts | {"run": self.mll.training_state()}, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        """What a user does in a new process."""
        saved = torch.load(file, weights_only=True)
        self.mll.load_state_dict(saved["state"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.mll.load_training_state(saved["run"])


def _gaussian(mll_class: type, name: str = "matern-3/2", **options: Any) -> Callable[[int], Run]:
    def make(seed: int) -> Run:
        case = regression(kernels.ScaleKernel(kernels.RBFKernel()), n=60) if name == "rbf" else CASES[name]()
        mll = mll_class(case.likelihood, case.model, generator=seed, **options)
        return Run(mll, torch.optim.Adam(case.model.parameters(), lr=0.05), case.x, case.y)

    return make


def _features(method: str) -> Callable[[int], Run]:
    def make(seed: int) -> Run:
        case = feature_case(KERNELS["deep-fourier"](), n=40)
        mll = METHODS[method](case.likelihood, case.model, batch_size=8, generator=seed)
        return Run(mll, torch.optim.Adam(mll.parameters(), lr=0.02), case.x, case.y)

    return make


def _laplace(likelihood: str, **options: Any) -> Callable[[int], Run]:
    def make(seed: int) -> Run:
        problem = laplace_case(likelihood, n=30)
        mll = gpi.mlls.LaplaceMarginalLogLikelihood(problem.likelihood, problem.model, generator=seed, **options)
        return Run(mll, torch.optim.Adam(problem.model.parameters(), lr=0.05), problem.x, problem.y)

    return make


def _quadruply(basis: str, **options: Any) -> Callable[[int], Run]:
    def make(seed: int) -> Run:
        model, x, y = fourier_problem(m=80, num_dense_columns=2)
        if basis == "nystrom":
            kernel = kernels.ScaleKernel(kernels.RBFKernel()).double()
            model = gpi.models.QuadruplyStochasticGP(gpi.models.NystromBasis(kernel, quasi_normal(20, 2, root=3.0), 40))
        likelihood = gaussian_likelihood(0.1)
        sizes = {"num_feature_samples": 20, "num_data_samples": 30}
        if basis == "fixed":
            model.basis.requires_grad_(False)
        else:
            sizes["num_control_points"] = 25
        sizes |= options
        mll = gpi.mlls.QuadruplyStochasticELBO(likelihood, model, generator=seed, **sizes)
        rates = {"num_steps": 9, "hyper_learning_rate": 0.01}  # hyperparameters move at once: no tenth of the steps
        optimizer = QuadruplyStochasticOptimizer(model, likelihood, num_data=len(x), **rates)
        return Run(mll, optimizer, x, y)

    return make


CG = ConjugateGradients(tolerance=1e-3)
VECCHIA = ConjugateGradients(tolerance=1e-3, preconditioner=gpi.preconditioners.Vecchia(5))
SMALL = {"solver": CG, "num_probes": 4}
RUNS: dict[str, Callable[[int], Run]] = {
    "hutchinson": _gaussian(gpi.mlls.HutchinsonMarginalLogLikelihood, **SMALL),
    "hutchinson-rademacher": _gaussian(gpi.mlls.HutchinsonMarginalLogLikelihood, probes="rademacher", **SMALL),
    "hutchinson-cold": _gaussian(gpi.mlls.HutchinsonMarginalLogLikelihood, warm_start=False, **SMALL),
    "hutchinson-previous": _gaussian(gpi.mlls.HutchinsonMarginalLogLikelihood, warm_start="previous", **SMALL),
    "hutchinson-projections": _gaussian(
        gpi.mlls.HutchinsonMarginalLogLikelihood, solver=AlternatingProjections(block_size=9), num_probes=4
    ),
    "hutchinson-sgd": _gaussian(
        gpi.mlls.HutchinsonMarginalLogLikelihood,
        solver=StochasticGradientDescent(batch_size=10, max_epochs=2000, tolerance=0.1),
        num_probes=4,
    ),
    "hutchinson-vecchia": _gaussian(gpi.mlls.HutchinsonMarginalLogLikelihood, solver=VECCHIA, num_probes=4),
    "hutchinson-vecchia-cold": _gaussian(
        gpi.mlls.HutchinsonMarginalLogLikelihood, solver=VECCHIA, num_probes=4, warm_start=False
    ),
    "hutchinson-batch": _gaussian(gpi.mlls.HutchinsonMarginalLogLikelihood, "batch", **SMALL),
    "hutchinson-exact": _gaussian(gpi.mlls.HutchinsonMarginalLogLikelihood),
    "pathwise": _gaussian(gpi.mlls.PathwiseMarginalLogLikelihood, num_frequencies=20, **SMALL),
    "pathwise-exact-prior": _gaussian(gpi.mlls.PathwiseMarginalLogLikelihood, prior="exact", **SMALL),
    "pathwise-cold": _gaussian(gpi.mlls.PathwiseMarginalLogLikelihood, num_frequencies=20, warm_start=False, **SMALL),
    "roulette": _gaussian(
        gpi.mlls.RussianRouletteMarginalLogLikelihood, "rbf", truncation=ExponentialTruncation(10, 0.1)
    ),
    "roulette-automatic": _gaussian(
        gpi.mlls.RussianRouletteMarginalLogLikelihood, "rbf", truncation=AutomaticTruncation()
    ),
    "roulette-frozen": _gaussian(
        gpi.mlls.RussianRouletteMarginalLogLikelihood,
        "rbf",
        truncation=ExponentialTruncation(10, 0.1),
        resample=False,
    ),
    "truncated-cg": _gaussian(gpi.mlls.TruncatedCGMarginalLogLikelihood, "rbf", num_steps=12),
    "rff": _gaussian(gpi.mlls.RFFMarginalLogLikelihood, num_frequencies=12),
    "single-sample": _gaussian(
        gpi.mlls.SingleSampleRFFMarginalLogLikelihood, min_frequencies=4, frequency_step=3, max_frequencies=13
    ),
    "laplace-exact": _laplace("logit"),
    "laplace": _laplace("poisson-log", solver=LaplaceNewton(max_rank=5)),
    "laplace-softmax": _laplace("softmax", solver=LaplaceNewton()),
    "laplace-logit": _laplace("logit", solver=LaplaceNewton()),
    "laplace-elbo": _laplace("logit", objective="elbo", solver=LaplaceNewton(num_covariance_actions=5)),
    "quadruply": _quadruply("fourier"),
    "quadruply-nystrom": _quadruply("nystrom"),
    "quadruply-kept": _quadruply("fixed", num_steps_per_batch=3),
} | {f"features-{method}": _features(method) for method in METHODS}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.ApproximationWarning")
@pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning")
@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_resumed_run_is_the_same_run(name: str) -> None:
    """Saved after one step and after four; without the mll's own state it would be another."""
    run = RUNS[name](3)
    run.train(1)
    early, losses = run.save(), run.train(3)
    late = run.save()
    losses += run.train(3)
    for file, expected in ((early, losses), (late, losses[3:])):
        resumed = RUNS[name](99)
        resumed.load(file)
        assert resumed.train(len(expected)) == expected
        for ours, theirs in zip(resumed.mll.parameters(), run.mll.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    if name not in ("hutchinson-exact", "laplace-exact"):
        late.seek(0)
        saved, other = torch.load(late, weights_only=True), RUNS[name](99)
        other.mll.load_state_dict(saved["state"])
        other.optimizer.load_state_dict(saved["optimizer"])
        assert other.train(3) != losses[3:]


class NoiseArgument(gpytorch.likelihoods.GaussianLikelihood):
    """Noise that is an argument, named or not."""

    def _shaped_noise_covar(self, base_shape: torch.Size, *params: Any, noise: Any = None, **kwargs: Any) -> Any:
        return DiagLinearOperator(params[0] if noise is None else noise)


def _poisson(n: int) -> Any:
    model = LaplaceModel(inputs(n), torch.arange(n).to(inputs(n)) % 4, Exposed())
    return gpi.mlls.LaplaceMarginalLogLikelihood(model.likelihood, model, generator=0)


def _hutchinson(n: int) -> Any:
    case = feature_case(kernels.ScaleKernel(kernels.RBFKernel()), n, likelihood=NoiseArgument())
    return gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model, generator=0)


def _natural(n: int) -> Any:
    case = feature_case(KERNELS["fourier"](), n, likelihood=NoiseArgument())
    return METHODS["natural"](case.likelihood, case.model, batch_size=8, generator=0)


@pytest.mark.parametrize("how", ["state", "to"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(_poisson, None), (_hutchinson, None), (_hutchinson, "noise"), (_natural, None), (_natural, "noise")],
)
def test_arguments_of_the_likelihood_are_part_of_a_run(make: Callable[[int], Any], name: str | None, how: str) -> None:
    """Predictions after a load, and in another dtype, take those of the last call."""
    mll, fresh, values = make(40), make(40), torch.linspace(0.2, 3, 40, dtype=torch.float64)
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    mll(mll.model(x), y, *([] if name else [values]), **({name: values} if name else {}))
    test = 0.9 * x[:3]
    expected = mll.posterior()(test).mean
    if how == "state":
        file = io.BytesIO()
        torch.save(mll.training_state(), file)
        file.seek(0)
        fresh.load_training_state(torch.load(file, weights_only=True))
        found = fresh.posterior()(test).mean
    else:
        found = mll.float().posterior()(test.float()).mean.double()
    tolerance = 1e-6 if how == "state" else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_arguments_that_no_training_state_can_hold() -> None:
    mll, noise = _hutchinson(20), torch.ones(20, dtype=torch.float64)
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    mll(mll.model(x), y, noise, weights=[{"all": object()}])
    with pytest.raises(ValueError, match="tensors, numbers or strings, no object"):
        mll.training_state()
    mll(mll.model(x), y, noise, [x, 3.0])
    state = mll.training_state()
    for odd in (torch.zeros(5, dtype=torch.uint8), torch.zeros(0), "text"):
        with pytest.raises(ValueError, match=r"training_state\(\)"):
            mll.load_training_state(state | {"params.bytes": odd})
    mll.load_training_state(state)
    assert mll.training_state()["params.bytes"].equal(state["params.bytes"])


def test_every_marginal_log_likelihood_is_here() -> None:
    public = (getattr(gpi.mlls, name) for name in gpi.mlls.__all__)
    wanted = {
        kind
        for kind in public
        if issubclass(kind, gpytorch.mlls.MarginalLogLikelihood) and not inspect.isabstract(kind)
    }
    wanted -= {gpi.mlls.GaussianMarginalLogLikelihood, gpi.mlls.IterativeMarginalLogLikelihood}
    assert {type(make(0).mll) for make in RUNS.values()} == wanted

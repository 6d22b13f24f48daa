"""A training state says what it belongs to, and a load that does not fit is refused before anything is changed."""

import copy
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch import kernels

import gpy_iterative as gpi
from gpy_iterative.solvers import ConjugateGradients, LaplaceNewton
from gpy_iterative.training.state_description import FORMAT, StateDescription
from gpy_iterative.truncation import AutomaticTruncation, ExponentialTruncation
from tests.exact.gaussian_models import regression
from tests.exact.test_resume import RUNS
from tests.features.feature_models import KERNELS, feature_case
from tests.laplace.cases import case as laplace_case
from tests.quadruply.quadruply_models import fourier_problem, gaussian_likelihood

#: One run of each class.
CLASSES = sorted({type(make(0).mll).__name__: name for name, make in sorted(RUNS.items())}.values())

pytestmark = [
    pytest.mark.filterwarnings("ignore::gpy_iterative.errors.ApproximationWarning"),
    pytest.mark.filterwarnings("ignore::gpy_iterative.errors.VarianceWarning"),
]


def assert_refused(mll: Any, state: Any, match: str) -> None:
    before = mll.training_state()
    with pytest.raises(ValueError, match=match):
        mll.load_training_state(state)
    after = mll.training_state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_no_state_of_this_class_is_refused(name: str) -> None:
    run = RUNS[name](3)
    run.train(1)
    state = run.mll.training_state()
    description = state["description"]
    assert_refused(run.mll, None, "is a dict, got NoneType")
    assert_refused(run.mll, [state], "is a dict, got list")
    assert_refused(run.mll, {}, "no training state")
    assert_refused(run.mll, {"weights": torch.ones(2)}, "no training state")
    for garbled in (torch.ones(2), "text", description[:-1]):
        assert_refused(run.mll, state | {"description": garbled}, "cannot be read")
    without = {key: tensor for key, tensor in state.items() if key != "description"}
    assert_refused(run.mll, without, "Training can go on without it")
    entries = json.loads(bytes(description.tolist()))
    del entries["dtypes and shapes"]
    shorter = torch.tensor(list(json.dumps(entries).encode()), dtype=torch.uint8)
    assert_refused(run.mll, state | {"description": shorter}, "no training state: entries were added")
    fewer = {name: state[name] for name in state if name != "generator"}
    for changed in (
        fewer,
        state | {"generator": 3},
        state | {"generator": state["generator"].float()},
        state | {"generator": state["generator"][:3]},
        state | {"rows.more": 3},
    ):
        assert_refused(run.mll, changed, "no training state: entries were added, removed or changed")
    foreign = RUNS["rff" if name != "rff" else "pathwise"](4).mll
    method = type(run.mll).__name__
    assert_refused(
        run.mll, foreign.training_state(), f"run: method is '{type(foreign).__name__}' in it and '{method}' here. Use"
    )
    run.mll.load_training_state(state)


@pytest.mark.parametrize("name", CLASSES)
def test_states_are_tensors_that_are_read_without_trust(name: str) -> None:
    run = RUNS[name](3)
    run.train(1)
    file = io.BytesIO()
    torch.save(run.mll.training_state(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    run.mll.load_training_state(state)


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("quadruply")])
def test_other_data_and_dtypes_are_noticed(name: str) -> None:
    run, other = RUNS[name](3), RUNS[name](3)
    run.train(1)
    state = run.mll.training_state()
    model = other.mll.model
    model.set_train_data(run.x[..., 2:, :], run.y[..., 2:], strict=False)
    assert_refused(
        other.mll, state, r"run: number of training inputs is [^;]*; shape of the targets is [^;]* here\. Use"
    )
    model.set_train_data(run.x.float(), run.y if not run.y.is_floating_point() else run.y.float(), strict=False)
    assert_refused(other.mll, state, "dtype is 'torch.float64' in it and 'torch.float32' here")


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("quadruply")])
def test_other_data_of_the_same_size_are_noticed(name: str) -> None:
    run, other = RUNS[name](3), RUNS[name](3)
    run.train(1)
    state, model = run.mll.training_state(), other.mll.model
    scaled = run.x * torch.linspace(1.0, 1.2, run.x.shape[-1])
    for x, y in ((run.x.flip(-2), run.y), (scaled, run.y), (run.x, run.y.flip(-1))):
        model.set_train_data(x, y, strict=False)
        assert_refused(other.mll, state, "run: the training data are others")
    model.set_train_data(run.x * (1 + 1e-6), run.y, strict=False)  # standardised with another number of threads
    other.mll.load_training_state(state)


def test_one_moved_entry_is_noticed() -> None:
    """In every row and column, among more rows than a cosine's period; and missing targets are no zeros."""
    n = 2000
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 12, generator=generator), torch.randn(n, generator=generator)
    y[7] = torch.nan
    model = regression(kernels.RBFKernel(ard_num_dims=12), n=50).model.float()
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
    model.set_train_data(x, y, strict=False)
    state = mll.training_state()
    for row, column in ((0, 0), (1, 10), (700, 10), (1999, 11)):
        moved = x.clone()
        moved[row, column] += 0.01
        model.set_train_data(moved, y, strict=False)
        assert_refused(mll, state, "the training data are others")
    swapped = torch.arange(n)
    swapped[[20, 730]] = swapped[[730, 20]]
    for targets in (y.nan_to_num(0.0), y[swapped], y + 0.01 * torch.eye(n)[3]):
        model.set_train_data(x, targets, strict=False)
        assert_refused(mll, state, "the training data are others")
    # Standardised again: other last digits.
    model.set_train_data((3 * x + 0.7 - 0.7) / 3, (y * 7 + 1e-7) / 7, strict=False)
    assert not torch.equal(model.train_inputs[0], x)
    mll.load_training_state(state)


def test_inputs_are_told_by_their_columns() -> None:
    """Constant columns, offsets that hide what varies, missing targets, and inputs that are learned."""
    x, y = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)).double(), torch.arange(50.0).double()
    x[:, 0], x[:, 1] = 0.1, x[:, 1] + 1e6
    y[3] = torch.nan
    model = regression(kernels.RBFKernel(ard_num_dims=3), n=50).model
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(model.likelihood, model)
    model.set_train_data(x, y, strict=False)
    state = mll.training_state()
    for column in (x[:, 1].flip(0), 1e6 + 1.1 * (x[:, 1] - 1e6)):
        model.set_train_data(torch.stack([x[:, 0], column, x[:, 2]], dim=-1), y, strict=False)
        assert_refused(mll, state, "the training data are others")
    model.set_train_data(x * (1 + 1e-15), y, strict=False)
    mll.load_training_state(state)
    model.set_train_data(x.clone().requires_grad_(), y, strict=False)
    state = mll.training_state()
    model.set_train_data((2 * x).requires_grad_(), y, strict=False)
    mll.load_training_state(state)


CG = ConjugateGradients(tolerance=1e-3)
GAUSSIAN: list[tuple[type, dict, dict]] = [
    (gpi.mlls.HutchinsonMarginalLogLikelihood, {"num_probes": 4}, {"num_probes": 5}),
    (gpi.mlls.HutchinsonMarginalLogLikelihood, {}, {"probes": "rademacher"}),
    (gpi.mlls.HutchinsonMarginalLogLikelihood, {}, {"warm_start": False}),
    (gpi.mlls.PathwiseMarginalLogLikelihood, {}, {"corrected": False}),
    (gpi.mlls.PathwiseMarginalLogLikelihood, {"num_frequencies": 10}, {"num_frequencies": 11}),
    (gpi.mlls.RussianRouletteMarginalLogLikelihood, {}, {"truncation": ExponentialTruncation(10, 0.1)}),
    (gpi.mlls.RussianRouletteMarginalLogLikelihood, {}, {"truncation": AutomaticTruncation()}),
    (gpi.mlls.RussianRouletteMarginalLogLikelihood, {}, {"num_truncations": 3}),
    (gpi.mlls.RussianRouletteMarginalLogLikelihood, {}, {"probe_truncation": "shared"}),
    (gpi.mlls.RussianRouletteMarginalLogLikelihood, {}, {"resample": False}),
    (gpi.mlls.TruncatedCGMarginalLogLikelihood, {}, {"num_steps": 3}),
    (gpi.mlls.RFFMarginalLogLikelihood, {}, {"num_frequencies": 5}),
    (gpi.mlls.SingleSampleRFFMarginalLogLikelihood, {}, {"probabilities": "adaptive"}),
]


@pytest.mark.parametrize(("make", "options", "changed"), GAUSSIAN)
def test_other_options_are_refused_by_name(make: type, options: dict, changed: dict) -> None:
    case = regression(kernels.RBFKernel(), n=10)
    state = make(case.likelihood, case.model, generator=0, **options).training_state()
    other = make(case.likelihood, case.model, generator=1, **(options | changed))
    (name,) = changed
    named = {"probe_truncation": "shares_truncation", "num_steps": "truncation", "corrected": "probes"}.get(name, name)
    assert_refused(other, state, rf"({named}|probes) is .* in it and .*data and options of that run")


@pytest.mark.parametrize("changed", [{"objective": "elbo"}, {"num_probes": 3}])
def test_other_options_of_laplace_are_refused(changed: dict) -> None:
    problem = laplace_case("logit", n=12)
    make = gpi.mlls.LaplaceMarginalLogLikelihood
    options = {"solver": LaplaceNewton(), "generator": 0}
    state = make(problem.likelihood, problem.model, **options).training_state()
    other = make(problem.likelihood, problem.model, **(options | changed))
    assert_refused(other, state, rf"{next(iter(changed))} is ")
    poisson = laplace_case("poisson-log", n=12)
    other = make(poisson.likelihood, poisson.model, **options)
    assert_refused(other, state, "likelihood is 'LogitBernoulliLikelihood' in it and 'PoissonLogLikelihood' here")


def test_another_number_of_latent_functions_is_refused() -> None:
    make, two = gpi.mlls.LaplaceMarginalLogLikelihood, laplace_case("softmax", n=12)
    mll = make(two.likelihood, two.model, generator=0)
    mll(two.model(two.x), two.y)
    state = mll.training_state()
    latents = two.model.latents + 1
    model = type(two.model)(two.x, two.y, copy.deepcopy(two.likelihood), latents)
    refused = f"number of latent functions is {latents - 1} in it and {latents} here"
    assert_refused(make(model.likelihood, model, generator=0), state, refused)
    assert model.training


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (gpi.mlls.VariationalFeatureMarginalLogLikelihood, {"update": "gradient"}),
        (gpi.mlls.VariationalFeatureMarginalLogLikelihood, {"tracker_rate": 0.9}),
        (gpi.mlls.VariationalFeatureMarginalLogLikelihood, {"centred": False}),
        (gpi.mlls.CompositionalMarginalLogLikelihood, {"tracker_rate": 0.9}),
        (gpi.mlls.MinimaxMarginalLogLikelihood, {"mu": 40.0}),
        (gpi.mlls.MinibatchMarginalLogLikelihood, {"batch_size": 9}),
    ],
)
def test_other_options_of_mini_batches_are_refused(make: type, changed: dict) -> None:
    case = feature_case(KERNELS["fourier"](), n=20)
    state = make(case.likelihood, case.model, generator=0).training_state()
    other = make(case.likelihood, case.model, generator=0, **changed)
    assert_refused(other, state, rf"{next(iter(changed))} is ")


@pytest.mark.parametrize(
    "changed",
    [
        {"num_data_samples": 12},
        {"num_feature_samples": 24},
        {"num_steps_per_batch": 2},
        {"num_data": 60},
    ],
)
def test_other_options_of_quadruply_stochastic_are_refused(changed: dict) -> None:
    options = {"num_feature_samples": 20, "num_data_samples": 10, "num_steps_per_batch": 3, "generator": 0}
    states, make = [], gpi.mlls.QuadruplyStochasticELBO
    for more in ({}, changed):
        model, x, y = fourier_problem(m=80)
        model.basis.requires_grad_(False)
        mll = make(gaussian_likelihood(0.2), model, **(options | more))
        mll(model(x), y)
        states.append(mll.training_state())
    assert_refused(mll, states[0], rf"{next(iter(changed))} is ")


def test_data_of_another_size_are_noticed_by_a_resumed_quadruply_stochastic_run() -> None:
    model, x, y = fourier_problem(m=80)
    mll = gpi.mlls.QuadruplyStochasticELBO(gaussian_likelihood(0.2), model, num_feature_samples=20, generator=0)
    mll(model(x), y)
    again = gpi.mlls.QuadruplyStochasticELBO(gaussian_likelihood(0.2), model, num_feature_samples=20, generator=1)
    again.load_training_state(mll.training_state())
    with pytest.raises(ValueError, match=f"first {len(x)} rows"):
        again(model(x[3:]), y[3:])
    again(model(x), y)


def test_numbers_of_numpy_are_numbers() -> None:
    case = regression(kernels.RBFKernel(), n=10)
    mll = gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model)
    ours, same, other = (StateDescription.of(mll, {"size": size}) for size in (8, np.int64(8), np.int64(9)))
    assert ours == same
    with pytest.raises(ValueError, match="size is 8 in it and 9 here"):
        other.taken_from(ours.added_to({}))


def test_descriptions_are_the_same_in_every_process() -> None:
    case = regression(kernels.RBFKernel(), n=10)
    options = {"rate": lambda step: 0.1, "cut": ExponentialTruncation(4, 0.1), "kernel": kernels.RBFKernel()}
    first = StateDescription.of(gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model), options)
    second = StateDescription.of(
        gpi.mlls.HutchinsonMarginalLogLikelihood(*copy.deepcopy((case.likelihood, case.model))),
        options | {"rate": lambda step: 0.2, "kernel": kernels.RBFKernel()},
    )
    assert first == second
    assert " at 0x" not in repr(first)
    assert first.taken_from(second.added_to({"entry": torch.ones(1)})) == {"entry": torch.ones(1)}
    kept = {"levels": torch.tensor([1.0, 2.0]), "sizes": (3, 4), "kind": ExponentialTruncation, "rule": torch.relu}
    for name, other in {
        "levels": torch.ones(2),
        "sizes": (3, 5),
        "kind": AutomaticTruncation,
        "rule": torch.exp,
    }.items():
        ours, theirs = (
            StateDescription.of(gpi.mlls.HutchinsonMarginalLogLikelihood(case.likelihood, case.model), options)
            for options in (kept, kept | {name: other})
        )
        assert ours == StateDescription(dict(theirs.entries, **{name: ours.entries[name]})) != theirs
        assert ours.taken_from(ours.added_to({})) == {}
    fewer = StateDescription({name: value for name, value in first.entries.items() if name != "cut"})
    for ours, theirs in ((first, fewer), (fewer, first)):
        with pytest.raises(ValueError, match="run: cut is"):
            ours.taken_from(theirs.added_to({}))
    later = StateDescription(first.entries | {"format": FORMAT + 1}).added_to({})
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, and this version of gpy_iterative reads {FORMAT}"):
        first.taken_from(later)

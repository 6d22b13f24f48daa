"""The linear system of the training data."""

import pytest

from gpy_iterative.linear_operators.products import KernelProducts
from gpy_iterative.training.training_system import linear_system, num_training_data
from tests.exact.gaussian_models import CASES


@pytest.mark.parametrize(
    "name", ["rbf", "multitask", "batch", "derivatives", "independent-outputs", "listed-outputs", "coregionalization"]
)
def test_rows_of_the_matrix(name: str) -> None:
    case = CASES[name]()
    prior = case.model(*case.model.train_inputs)
    system = linear_system(case.likelihood, prior, case.model.train_targets, case.params, {}, products=KernelProducts())
    assert num_training_data(case.model) == system.operator.shape[-1]

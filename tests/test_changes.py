"""Changes of tensors, by version and by value."""

import copy
import gc
import math

import numpy as np
import torch

from gpy_iterative.changes import SeenData, SeenVersions, same_tensor, same_value


def test_versions_tell_views_apart() -> None:
    tensor = torch.zeros(4)
    view = tensor[:3]
    seen = SeenVersions.of([view])
    assert seen.are([view])
    assert not seen.are([tensor[:3]])
    assert not seen.are([])
    tensor[3] = 1.0
    assert not seen.are([view])


def test_versions_see_nothing_of_data_and_values_do() -> None:
    tensor = torch.zeros(3)
    versions, values = SeenVersions.of([tensor]), [tensor.clone()]
    tensor.data += 1
    assert versions.are([tensor])
    assert not same_value(values, [tensor])
    assert same_value(values, [torch.zeros(3)])


def test_versions_keep_no_tensor_alive_and_are_not_copied() -> None:
    tensor = torch.zeros(3)
    seen = SeenVersions.of([tensor])
    assert not copy.deepcopy(seen).are([tensor])
    del tensor
    gc.collect()
    assert not seen.are([torch.zeros(3)])


def test_inference_tensors_are_compared_by_value() -> None:
    with torch.inference_mode():
        tensor, other = torch.zeros(3), torch.zeros(3)
        seen = SeenVersions.of([tensor, torch.ones(2)[:1]])
        assert not seen.are([tensor])
        seen = SeenVersions.of([tensor])
        assert seen.are([tensor])
        assert not seen.are([other])
        tensor[1] = 1.0
        assert not seen.are([tensor])
    assert SeenVersions.of([tensor]).are([tensor])


def test_data_are_the_same_in_other_tensors_and_others_after_a_write() -> None:
    x, y = torch.rand(4, 2), torch.rand(4)
    seen = SeenData.of([x, y])
    assert seen.are([x, y])
    assert seen.are([x.clone(), y.double()])
    assert not seen.are([x, y + 1])
    assert not seen.are([x])
    assert not seen.are([x[:3], y[:3]])
    assert copy.deepcopy(seen).are([x, y])
    before = x.clone()
    x[0] = 2
    assert not seen.are([x, y])
    assert not seen.are([before, y])
    with torch.inference_mode():
        inference = torch.rand(3)
    assert SeenData.of([inference]).are([inference])


def test_learned_data_may_move() -> None:
    learned = torch.rand(3, requires_grad=True)
    seen = SeenData.of([learned])
    with torch.no_grad():
        learned += 1
    assert seen.are([learned])
    assert seen.are([torch.zeros(3, requires_grad=True)])
    assert not seen.are([torch.zeros(2, requires_grad=True)])


def test_same_tensors_have_the_same_kind_and_missing_values() -> None:
    tensor = torch.tensor([1.0, torch.nan])
    assert same_tensor(tensor, tensor.clone())
    assert not same_tensor(tensor, tensor.double())
    assert not same_tensor(tensor, torch.tensor([1.0, 2.0]))
    assert not same_tensor(torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


def test_same_values_have_the_same_types_and_contents() -> None:
    value = {"numbers": [1, (2.5, math.nan)], "tensor": torch.tensor([torch.nan]), "name": "x"}
    assert same_value(value, copy.deepcopy(value))
    assert not same_value(value, value | {"numbers": [1, [2.5, math.nan]]})
    assert not same_value(value, value | {"tensor": torch.zeros(1)})
    assert not same_value(value, value | {"more": None})
    assert not same_value(1, True)
    array = np.zeros(2)  # its comparison is no bool
    assert same_value([array], [array])
    assert not same_value([array], [np.zeros(2)])

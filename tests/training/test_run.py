"""A run: immutable, saved and loaded as tensors."""

import pytest
import torch

from gpy_iterative.training.run import Run


def test_a_generator_of_the_run_draws_the_same_until_the_run_is_replaced() -> None:
    run = Run.begin(3)
    first, again = run.generator(), run.generator()
    assert torch.equal(torch.rand(4, generator=first), torch.rand(4, generator=again))
    after = run.having(first)
    assert torch.equal(torch.rand(4, generator=after.generator()), torch.rand(4, generator=again))
    assert torch.equal(run.position, Run.begin(3).position)


def test_parts_are_replaced_and_removed_in_a_new_run() -> None:
    run = Run.begin(0).having(probes={"signs": torch.ones(3)}, shares={"value": torch.zeros(2)})
    other = run.having(probes=None, shares={"value": torch.ones(2)})
    assert other.parts.get("probes") is None
    assert torch.equal(other.parts.get("shares")["value"], torch.ones(2))
    assert torch.equal(run.parts.get("shares")["value"], torch.zeros(2))
    assert run.mapped(torch.Tensor.double).parts["probes"]["signs"].dtype == torch.float64


def test_what_is_saved_is_loaded() -> None:
    run = Run.begin(5).having(probes={"signs": torch.ones(3), "a.b": torch.zeros(1)})
    loaded = Run.begin(0).loaded(run.to_dict())
    assert loaded.to_dict().keys() == run.to_dict().keys()
    assert all(torch.equal(tensor, run.to_dict()[name]) for name, tensor in loaded.to_dict().items())


def test_the_state_of_another_kind_of_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="another kind of generator"):
        Run.begin(0).loaded({"generator": torch.zeros(4, dtype=torch.uint8)})

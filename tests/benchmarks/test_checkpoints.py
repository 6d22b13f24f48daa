"""A checkpoint is whole, or not there."""

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoints import Checkpoint


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "folder" / "run.seed=0.pt")
    assert checkpoint.load() is None
    checkpoint.remove()
    checkpoint.save({"steps": 3, "model": {"weight": torch.ones(2)}})
    content = checkpoint.load()
    assert content is not None
    assert content["steps"] == 3
    assert torch.equal(content["model"]["weight"], torch.ones(2))
    checkpoint.remove()
    assert checkpoint.load() is None


def test_an_interrupted_save_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tmp_path / "run.pt")
    checkpoint.save({"steps": 1})

    def interrupted(content: dict, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save({"steps": 2})
    assert checkpoint.load() == {"steps": 1}

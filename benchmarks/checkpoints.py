"""Files that interrupted runs go on from.

A run of hours is cut into pieces: each call goes on from the last checkpoint, for as many minutes as it is given.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import RESULTS

#: The folder for what runs leave while they are not finished.
OUT = RESULTS.parent.parent / "out"


@dataclass(frozen=True)
class Checkpoint:
    """The state of one run: tensors, numbers, and containers of them.

    Args:
        path: of the file, which need not exist.
    """

    path: Path

    def load(self) -> dict[str, Any] | None:
        """None where there is none."""
        return torch.load(self.path, weights_only=True) if self.path.exists() else None

    def save(self, content: dict[str, Any]) -> None:
        """Whatever happens in the middle of it leaves the last file whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".new")
        torch.save(content, new)
        new.replace(self.path)

    def remove(self) -> None:
        """What is finished needs none."""
        self.path.unlink(missing_ok=True)

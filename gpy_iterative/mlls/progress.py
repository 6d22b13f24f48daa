"""The bar that `progress=True` shows for every solve."""

from collections.abc import Callable

from tqdm.auto import tqdm

from gpy_iterative.solvers import SolveProgress

Progress = bool | Callable[[SolveProgress], None]


class SolveBar:
    """A bar of epochs, with the residuals of every group beside it; closed by its `with` block."""

    def __enter__(self) -> "SolveBar":
        self._bar = tqdm(
            desc="solve", unit=" epochs", bar_format="{desc}: {n:.1f}{unit} [{elapsed}] {postfix}", leave=False
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, progress: SolveProgress) -> None:
        self._bar.set_postfix({name: f"{norm:.2g}" for name, norm in progress.residual_norms.items()}, refresh=False)
        self._bar.update(progress.epochs - self._bar.n)

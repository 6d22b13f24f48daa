"""Solves that end after so many epochs, whatever is left: figure 9 and tables 7 to 10 of Lin et al. 2024."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks import published
from benchmarks.cases.pathwise import (
    FROM_ONES,
    QUICK_SIZES,
    QUICK_SOLVERS,
    REFERENCE,
    SOLVERS,
    VARIANTS,
    draw_steps,
    grouped,
    mean,
    planned_run,
    shown,
)
from benchmarks.runs import Measured, Run
from benchmarks.suite import Case, Preset, register
from benchmarks.tables import Table

COLD, WARM = "pathwise, cold", "pathwise, warm"
BUDGETS = (10, 20, 30, 40, 50)


def preset_runs(preset: Preset) -> list[Run]:
    """All solvers, probes and starts; QUICK has pathwise probes and ten epochs, as the published tables, without SGD."""
    if preset is Preset.SMOKE:
        return [
            planned_run("AP", variant, dataset="wine", max_epochs=2, rows=300, steps=2, block_size=30, **FROM_ONES)
            for variant in (REFERENCE, WARM)
        ]
    if preset is Preset.QUICK:
        return [
            planned_run(solver, variant, dataset="pol", max_epochs=BUDGETS[0], **QUICK_SIZES)
            for solver in QUICK_SOLVERS
            for variant in (COLD, WARM)
        ]
    return [
        planned_run(
            solver, variant, dataset=name, max_epochs=budget, rows=None, steps=100, block_size=1000, **FROM_ONES
        )
        for name in published.LIN
        for budget in BUDGETS
        for solver in SOLVERS
        for variant in VARIANTS
    ]


def by_budget(found: Sequence[Measured]) -> dict[int, list[Measured]]:
    """Runs by the epochs they had."""
    groups: dict[int, list[Measured]] = {}
    for measured in found:
        groups.setdefault(measured.run.options["max_epochs"], []).append(measured)
    return groups


def tables(found: Sequence[Measured]) -> list[Table]:
    """A table a budget; with ten epochs, the published relation of large data sets as another."""
    result = []
    for budget, members in by_budget(found).items():
        rows = [
            [
                f"{dataset}, {solver}, {variant}",
                shown(mean(outcomes, "residual_targets"), 3),
                shown(mean(outcomes, "residual_probes"), 3),
                shown(mean(outcomes, "total"), 0),
                shown(mean(outcomes, "rmse"), 4),
                shown(mean(outcomes, "log_likelihood"), 3),
            ]
            for (dataset, solver, variant), outcomes in grouped(members).items()
        ]
        sizes = members[0].run.options
        columns = ["", "residual of targets", "of probes", "epochs", "RMSE", "log-likelihood"]
        size = members[0].outcome["train_rows"]
        steps = f"{sizes['steps']} steps from {sizes['start_from']}"
        title = f"At most {budget} epochs a step: {size:,} rows, {steps}; means over steps"
        result.append(Table(title, columns, rows))
    return [*result, _published()]


def _published() -> Table:
    rows = [
        [f"{dataset}, {solver}", *(f"{cold:.3f} → {warm:.3f}" for cold, warm in zip(*figures, strict=True))]
        for dataset, solvers in published.LIN_BUDGETS.items()
        for solver, figures in solvers.items()
    ]
    return Table(
        "Published: pathwise probes, ten epochs a step, cold → warm, 390,000 to 1,800,000 rows",
        ["", "residual of targets", "of probes"],
        rows,
    )


def pictures(found: Sequence[Measured], folder: Path) -> list[Path]:
    """Residuals of the probes step by step, a picture a budget."""
    return [
        draw_steps(
            grouped(members),
            folder / f"budget_{budget}.svg",
            lambda outcome: outcome["residual_probes"],
            "residual of probes",
            f"{{0}}, {{1}}, {budget} epochs",
        )
        for budget, members in by_budget(found).items()
        if budget == BUDGETS[0]
    ]


register(
    Case(
        "budgets",
        "Solves that end after 10 to 50 epochs: figure 9 and tables 7 to 10 of Lin et al. 2024.",
        preset_runs,
        tables,
        pictures,
    )
)

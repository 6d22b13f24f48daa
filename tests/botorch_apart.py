"""BoTorch without what its import does to everybody else.

`import botorch` changes process-wide settings of linear_operator and GPyTorch (which solver is used, for one), under which
other tests of the same process would no longer test what they say.
"""

import importlib
from typing import Any

import gpytorch
import linear_operator

_CHANGED = (
    (linear_operator.settings._fast_covar_root_decomposition, "_default"),
    (linear_operator.settings._fast_log_prob, "_default"),
    (linear_operator.settings._fast_solves, "_default"),
    (linear_operator.settings.cholesky_max_tries, "_global_value"),
    (linear_operator.settings.max_cholesky_size, "_global_value"),
    (gpytorch.settings.max_eager_kernel_size, "_global_value"),
)


def _import(*names: str) -> list[Any]:
    kept = [getattr(setting, name) for setting, name in _CHANGED]
    modules = [importlib.import_module(name) for name in names]
    for (setting, name), value in zip(_CHANGED, kept, strict=True):
        setattr(setting, name, value)
    return modules


acquisition, thompson, models, deterministic, transforms, sampling, search, fit, optim, paths, surrogate_fits = _import(
    "botorch.acquisition",
    "botorch.acquisition.thompson_sampling",
    "botorch.models",
    "botorch.models.deterministic",
    "botorch.models.transforms",
    "botorch.sampling",
    "botorch.utils.sampling",
    "botorch.fit",
    "botorch.optim.fit",
    "gpy_iterative.botorch",
    "benchmarks.surrogate_fits",
)

"""Solvers for linear systems with the kernel matrix.

Begin with `base.py`, the one loop, and `columns.py`, its tolerances and residuals; a solver's file has only its steps.
`default.py` chooses a solver. `logdet/` estimates log-determinants. The room may import `preconditioners`, `spectral` and
all below them.
"""

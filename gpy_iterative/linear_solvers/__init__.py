"""Solvers for linear systems with the kernel matrix.

Begin with `base.py` (the loop) and `columns.py` (tolerances and residuals); `default.py` chooses a solver,
`exact_factors.py` knows structures with an exact factor. It may import `preconditioners`, `spectral` and below.
"""

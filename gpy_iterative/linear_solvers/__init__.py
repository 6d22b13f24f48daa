"""Solvers for linear systems with the kernel matrix.

Begin with `base.py`, the one loop that owns tolerance, budget and warm start; every solver has a file and gives only
its steps. `default.py` chooses one. `logdet/` estimates log-determinants. The room may import `preconditioners`,
`spectral` and all below them.
"""

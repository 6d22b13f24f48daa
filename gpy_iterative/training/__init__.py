"""Shared by all methods: reports, run state, checks of data, gradient surrogate, progress.

Begin with `run.py` and `surrogate.py`. May import `linear_solvers` and below.
"""

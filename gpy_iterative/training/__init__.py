"""Shared by all methods: reports, run state, data checks, gradients, progress.

Begin with `run.py` and `surrogate.py`. May import `linear_solvers` and below.
"""

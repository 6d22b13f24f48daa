"""Shared by all methods: reports, run state, data checks, gradients, progress.

Begin with `run.py` and `surrogate.py`. It may import `linear_solvers` and below.
"""

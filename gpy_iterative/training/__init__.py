"""Shared by all methods.

Begin with `run.py` and `surrogate.py`. It may import `linear_solvers` and below.
"""

"""Posteriors of exact Gaussian processes: means, variances and sample paths.

Begin with `posterior.py`; then `training_solves.py`, and for variances `projection.py` and `local_part.py`. It may import
what `exact` may.
"""

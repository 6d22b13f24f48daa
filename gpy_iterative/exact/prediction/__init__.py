"""Posteriors of exact Gaussian processes: means, variances and sample paths.

Begin with `posterior.py` and `training_solves.py`; `projection.py` and `local_part.py` give variances. It may import what
`exact` may.
"""

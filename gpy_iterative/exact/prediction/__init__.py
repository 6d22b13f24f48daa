"""Posteriors of exact Gaussian processes: means from the training solves, variances from projections, sample paths.

Begin with `posterior.py`; `training_solves.py` has the solves that everything is made of, `projection.py` and
`local_part.py` the variances. It may import what `exact` may.
"""

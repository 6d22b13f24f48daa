"""Quadruply stochastic Gaussian processes: every training step samples a few of millions of features.

Begin with `model.py`, `elbo.py` and `known_points.py`; `bases/` has a file per basis. It may import `exact` and all below.
"""

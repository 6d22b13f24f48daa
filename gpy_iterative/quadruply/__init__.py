"""Quadruply stochastic Gaussian processes: every training step samples a few of millions of features.

Begin with `model.py`, `elbo.py` and `bases/`. It may import `exact` and below.
"""

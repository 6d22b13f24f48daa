"""Laplace's method for likelihoods that are not Gaussian, with computation-aware Newton steps (IterNCGP).

Begin with `model.py` (what a user holds) and `mll.py` (one training step); `newton/` finds the mode, `likelihoods/`
has log densities and curvature, `prediction/` the posterior. The room may import `exact` and all below it, and no
other method.
"""

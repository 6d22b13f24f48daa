"""Laplace's method for non-Gaussian likelihoods, with computation-aware Newton steps (IterNCGP).

Begin with `model.py` and `mll.py` (one training step). `newton/` finds the mode, `prediction/` the posterior. It may import
`exact` and all below it, no other method.
"""

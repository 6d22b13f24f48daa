"""Laplace's method for non-Gaussian likelihoods (IterNCGP).

Begin with `model.py` and `mll.py` (one training step). `newton/` finds the mode, `prediction/` the posterior. It may import
`exact` and all below.
"""

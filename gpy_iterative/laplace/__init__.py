"""Laplace's method for non-Gaussian likelihoods (IterNCGP).

Begin with `model.py` and `mll.py` (one training step). `newton/` finds the mode, `posterior.py` predicts. It may import
`exact` and all below.
"""

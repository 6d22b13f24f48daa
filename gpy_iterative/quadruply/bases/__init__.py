"""Feature bases of quadruply stochastic Gaussian processes.

Begin with `feature_basis.py`, the interface; each basis has a file. It may import what `quadruply` may.
"""

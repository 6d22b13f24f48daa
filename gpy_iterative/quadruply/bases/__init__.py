"""Feature bases of quadruply stochastic Gaussian processes.

Begin with `feature_basis.py`, what every basis gives; each basis has a file. The room may import what `quadruply` may.
"""

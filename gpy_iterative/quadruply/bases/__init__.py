"""Feature bases of quadruply stochastic Gaussian processes: `feature_basis.py` is the interface, each basis has a file."""

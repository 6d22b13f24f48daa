"""Newton's method for the mode of a non-Gaussian likelihood.

Begin with `base.py`, the loop; `newton.py` and `cholesky.py` (dense) solve its systems. It may import what `laplace` may.
"""

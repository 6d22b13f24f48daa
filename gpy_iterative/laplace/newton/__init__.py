"""Newton's method for the mode.

Begin with `base.py`; `newton.py` and `cholesky.py` (dense) solve its systems. It may import what `laplace` may.
"""

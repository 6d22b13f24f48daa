"""Newton's method for the mode.

Begin with `base.py`; `newton.py` and `cholesky.py` (with `dense.py`) solve its systems. It may import what `laplace` may.
"""

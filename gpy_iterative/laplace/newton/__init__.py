"""Newton's method for the mode.

Begin with `base.py`; `newton.py` and `dense.py` solve its systems. It may import what `laplace` may.
"""

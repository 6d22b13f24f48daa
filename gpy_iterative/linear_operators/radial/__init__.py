"""RBF, Matern and rational quadratic kernels in closed form.

Begin with `operator.py`; `functions.py` has the formulas, `tiles.py` and `keops.py` evaluate them. It may import what
`linear_operators` may.
"""

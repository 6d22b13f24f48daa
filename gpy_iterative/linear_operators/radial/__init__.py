"""RBF, Matern and rational quadratic kernels in closed form.

Begin with `operator.py`; `functions.py` has the formulas, `tiles.py` and `keops.py` evaluate them, `product.py` multiplies
kernels, at inputs on a grid by `grid.py`. It may import what `linear_operators` may.
"""

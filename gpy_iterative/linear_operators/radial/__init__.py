"""RBF, Matern and rational quadratic kernels: formulas, distances and derivatives in closed form.

Begin with `operator.py`; `functions.py` has the formulas, `tiles.py` evaluates them by GEMM, `keops.py` by
KeOps. It may import what `linear_operators` may.
"""

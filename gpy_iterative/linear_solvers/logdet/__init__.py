"""Log-determinants by stochastic Lanczos quadrature.

Begin with `lanczos.py`; `krylov_logarithm.py` is for truncated series. It may import what `linear_solvers` may.
"""

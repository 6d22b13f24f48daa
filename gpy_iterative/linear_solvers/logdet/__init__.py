"""Log-determinants by stochastic Lanczos quadrature.

Begin with `lanczos.py`. It may import what `linear_solvers` may.
"""

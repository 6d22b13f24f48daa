"""Log-determinants by stochastic Lanczos quadrature.

Begin with `lanczos.py`; `quadrature_shares.py` is its warm start from step to step. It may import what
`linear_solvers` may.
"""

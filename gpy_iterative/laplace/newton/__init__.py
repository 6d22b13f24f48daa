"""The mode of a Gaussian process with a likelihood that is not Gaussian: Newton's loop, and its linear systems.

Begin with `base.py`, the loop; `newton.py` (subspaces, any size) and `cholesky.py` (dense) solve its systems, and
`preconditioning.py` builds their preconditioner. It may import what `laplace` may.
"""

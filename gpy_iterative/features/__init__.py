"""Mini-batch training of kernels with finitely many features.

Begin with `base.py`, one mini-batch step. Each method has a file: `variational_feature.py`, `compositional.py`,
`minimax.py`, `minibatch.py`. It may import `exact` and all below.
"""

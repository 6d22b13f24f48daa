"""Mini-batch training of kernels with finitely many features.

Begin with `base.py`, which is one mini-batch step, and one file for each method: `variational_feature.py`,
`compositional.py`, `minimax.py`, `minibatch.py`. The room may import `exact` and all below it, and no other method.
"""

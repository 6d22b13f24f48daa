"""Mini-batch training of kernels with finitely many features.

Begin with `base.py`, one step, and the main method, `variational_feature.py`. It may import `exact` and all below.
"""

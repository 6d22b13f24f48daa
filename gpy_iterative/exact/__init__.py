"""Exact Gaussian processes: log marginal likelihoods, their gradients, and predictions.

Begin with `base.py`, which is one training step; `hutchinson.py` and `pathwise.py` only choose its probe vectors
(`probes.py`), and `prediction/` reuses the step's solves. The room may import `training` and all below it.
"""

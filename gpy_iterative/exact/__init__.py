"""Exact Gaussian processes: log marginal likelihoods, gradients, predictions.

Begin with `base.py`; `hutchinson.py` and `pathwise.py` choose the probes. It may import `training` and all below it.
"""

"""Exact Gaussian processes: log marginal likelihoods, gradients, predictions.

Begin with `base.py`, one training step; `hutchinson.py` and `pathwise.py` choose its probes. The folder may import
`training` and all below it.
"""

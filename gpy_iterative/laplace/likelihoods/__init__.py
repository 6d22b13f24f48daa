"""Likelihoods and their curvature for Laplace's method.

Begin with `pointwise.py`; `stock.py` has GPyTorch's likelihoods. It may import what `laplace` may.
"""

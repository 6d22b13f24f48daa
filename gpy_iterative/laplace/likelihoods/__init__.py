"""Likelihoods and their curvature for Laplace's method.

Begin with `pointwise.py`, the interface; `stock.py` has GPyTorch's own. It may import what `laplace` may.
"""

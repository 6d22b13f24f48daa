"""Likelihoods for Laplace's method: two that GPyTorch lacks, and the curvature of all.

Begin with `pointwise.py`, through which everything else sees a likelihood; `stock.py` has GPyTorch's own, in closed
form. It may import what `laplace` may.
"""

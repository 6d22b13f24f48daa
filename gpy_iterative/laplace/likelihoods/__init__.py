"""Likelihoods and their curvature for Laplace's method.

Begin with `pointwise.py`. It may import what `laplace` may.
"""

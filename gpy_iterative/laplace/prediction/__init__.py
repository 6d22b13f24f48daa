"""Posteriors around the mode: means, variances and sample paths.

Begin with `posterior.py`. It may import what `laplace` may.
"""

"""Posteriors around the mode.

Begin with `posterior.py`. It may import what `laplace` may.
"""

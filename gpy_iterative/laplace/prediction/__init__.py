"""Posteriors around the mode: means, variances and sample paths.

Begin with `posterior.py`; `fit.py` keeps the mode and notices when the model has changed. It may import what
`laplace` may.
"""

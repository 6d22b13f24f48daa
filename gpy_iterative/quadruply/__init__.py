"""Quadruply stochastic Gaussian processes: millions of features, of which every step samples some.

Begin with `model.py` (what a user holds), `elbo.py` (one training step) and `optimizers.py`; the bases have a file
each. The room may import `exact` and all below it, and no other method.
"""

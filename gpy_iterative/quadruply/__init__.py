"""Quadruply stochastic Gaussian processes: models with millions of features, of which every step samples some.

Begin with `model.py` (what a user makes), `elbo.py` (one training step) and `known_latent.py` (latent values known
between steps); `bases/` has a file for each basis. The room may import `exact` and all below it, and no other method.
"""

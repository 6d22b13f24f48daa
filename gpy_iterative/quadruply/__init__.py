"""Quadruply stochastic Gaussian processes: models with millions of features, of which every step samples some.

Read `model.py` (what a user makes), `elbo.py` (one training step) and `known_latent.py` first; the bases have a file each.
The room imports `exact` and the rooms below it, and no other method.
"""

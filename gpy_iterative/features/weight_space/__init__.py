"""Gaussian processes with finitely many features, as linear models.

Features u_i [m], residuals r_i, prior weights v ~ N(0, diag(c)) and noise variances s_i give the posterior N(P^-1 h, P^-1),
P = diag(1 / c) + sum_i u_i u_i^T / s_i, h = sum_i u_i r_i / s_i (Rasmussen and Williams 2006, section 2.1). Begin with
`problem.py`. It may import what `features` may.
"""

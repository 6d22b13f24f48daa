"""Gaussian processes with finitely many features, as linear models with Gaussian weights.

With features u_i [m], weights v ~ N(0, diag(c)) a priori and noise variances s_i, the posterior of the weights is
N(P^-1 h, P^-1) with P = diag(1 / c) + sum_i u_i u_i^T / s_i and h = sum_i u_i r_i / s_i: sums over data, which
mini-batches estimate without bias (Rasmussen and Williams 2006, section 2.1). Begin with `problem.py`. It may import
what `features` may.
"""

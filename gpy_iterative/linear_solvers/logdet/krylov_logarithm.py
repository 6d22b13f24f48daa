"""Logarithms of conjugate gradients' tridiagonal matrices T_j, as a series in j.

By log x = int_0^inf (1 / (1 + t) - 1 / (x + t)) dt, a term is an integral over differences of e_1^T (T_j + t)^-1 e_1. The
pivots of T_j + t are positive, so that small terms are accurate.
"""

import math

import torch
from torch import Tensor

#: Step of the trapezoidal rule in log t, of error exp(-2 pi^2 / step).
STEP = 0.5
#: Range of log t below and above the eigenvalues.
BELOW, ABOVE = 37.0, 19.0


def krylov_logarithm_terms(lengths: Tensor, products: Tensor) -> Tensor:
    """v_1, v_2 - v_1, v_3 - v_2, ... for v_j = e_1^T log(T_j) e_1.

    For a probe z, z^T P^-1/2 log(P^-1/2 H P^-1/2) P^-1/2 z is z^T P^-1 z times their sum.

    Args:
        lengths: step lengths of conjugate gradients [J, s], zero after a column's end.
        products: r_{j-1}^T P^-1 r_{j-1} [J, s].

    Returns:
        [J, s], float64; zero after a column's end.
    """
    lengths, products = lengths.double(), products.double()
    alive = lengths > 0
    terms = torch.zeros_like(lengths)
    if not len(lengths) or not alive.any():
        return terms
    terms[0] = -torch.where(alive[0], lengths[0], torch.ones_like(lengths[0])).log()
    inverse = torch.where(alive, 1 / torch.where(alive, lengths, 1.0), 0.0)
    ratios = torch.where(alive[1:], products[1:] / torch.where(alive[:-1], products[:-1], 1.0), 0.0)

    # Bounds on all eigenvalues: Gershgorin above, 1 / trace(T^-1) below.
    beside = ratios.sqrt() * inverse[:-1]
    diagonal = inverse.clone()
    diagonal[1:] += ratios * inverse[:-1]
    largest = diagonal.clone()
    largest[1:] += beside
    largest[:-1] += beside
    upper = largest.amax(0).log()
    lower = _log_smallest(lengths, ratios, alive)
    count = math.ceil(float((upper + ABOVE - lower + BELOW).max()) / STEP)
    # t and t dlog(t), [s, nodes].
    nodes = torch.exp(
        (lower - BELOW).unsqueeze(-1) + STEP * torch.arange(count + 1, dtype=torch.float64, device=lower.device)
    )
    measure = STEP * nodes

    # Pivots of T + t are 1 / length_j + excess_j, with excess_1 = t.
    excess = nodes
    coupling = torch.ones_like(nodes)  # (the product of beside_i / pivot_i)^2
    for j in range(1, len(lengths)):
        pivot = inverse[j - 1].unsqueeze(-1) + excess
        coupling = coupling * (beside[j - 1].unsqueeze(-1) / pivot).square()
        excess = nodes + (ratios[j - 1] * inverse[j - 1]).unsqueeze(-1) * (excess / pivot)
        terms[j] = -(measure * coupling / (inverse[j].unsqueeze(-1) + excess)).sum(-1)
    return torch.where(alive, terms, 0.0)


def _log_smallest(lengths: Tensor, ratios: Tensor, alive: Tensor) -> Tensor:
    """log(1 / trace(T^-1)) [s], with (T^-1)_ii = sum_{k >= i} lengths_k beta_i ... beta_{k-1}."""
    trace = torch.zeros_like(lengths[0])
    entry = torch.zeros_like(lengths[0])
    for j in range(len(lengths) - 1, -1, -1):
        following = ratios[j] * entry if j < len(ratios) else torch.zeros_like(entry)
        entry = torch.where(alive[j], lengths[j] + following, 0.0)
        trace = trace + entry
    return -torch.where(trace > 0, trace, 1.0).log()

"""What is left of a relevance vector machine when its irrelevant functions are dropped."""

import copy

import torch

from gpy_iterative.quadruply.bases.relevance_vector_basis import RelevanceVectorBasis
from gpy_iterative.quadruply.model import QuadruplyStochasticGP


@torch.no_grad()
def prune_relevance_vectors(model: QuadruplyStochasticGP) -> QuadruplyStochasticGP:
    """A new model with the relevant functions alone, and their weights; the given one stays as it is.

    Dense columns of irrelevant functions are dropped with them. Make new optimisers for its parameters.

    Args:
        model: with a RelevanceVectorBasis.

    Raises:
        ValueError: another basis, or one without a relevant function.
    """
    basis = model.basis
    if not isinstance(basis, RelevanceVectorBasis):
        raise ValueError(f"Only a RelevanceVectorBasis is pruned, got a {type(basis).__name__}.")
    kept = basis.relevant()
    if not len(kept):
        raise ValueError(
            f"No function has a precision below max_precision = {basis.max_precision:g}: raise it, or "
            "standardise the targets."
        )
    old, k = model.weights, model.weights.num_dense_columns
    columns = kept[kept < k]
    smaller = RelevanceVectorBasis(
        copy.deepcopy(basis.kernel),
        basis.points[kept],
        max_precision=basis.max_precision,
        sparse_gradients=basis.sparse_gradients,
    )
    smaller.log_precision.copy_(basis.log_precision[kept])
    result = QuadruplyStochasticGP(smaller, copy.deepcopy(model.mean_module), num_dense_columns=len(columns))
    root = torch.cat([old.dense_head_columns, old.tail_columns])[kept][:, columns]
    log_diagonal = torch.cat([old.head_log_diagonal, old.tail_log_diagonal.squeeze(-1)])[kept]
    mean, new, h = old.mean[kept], result.weights, result.weights.num_head
    new.head_mean.copy_(mean[:h])
    new.tail_mean.copy_(mean[h:].unsqueeze(-1))
    new.head_columns.copy_(root[:h])
    new.tail_columns.copy_(root[h:])
    new.head_log_diagonal.copy_(log_diagonal[:h])
    new.tail_log_diagonal.copy_(log_diagonal[h:].unsqueeze(-1))
    new.initialized.fill_(1)
    return result.train(model.training)

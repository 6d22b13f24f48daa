"""Likelihoods that GPyTorch lacks, and closed forms for those it integrates numerically."""

from gpy_iterative.likelihoods.expected_log_prob import expected_log_prob
from gpy_iterative.likelihoods.log_concave import check_binary_targets, is_log_concave
from gpy_iterative.likelihoods.logit_bernoulli import LogitBernoulliLikelihood

__all__ = ["LogitBernoulliLikelihood", "check_binary_targets", "expected_log_prob", "is_log_concave"]

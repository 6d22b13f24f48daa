"""Unbiased estimators by random truncation: Russian-roulette CG and single-sample random features.

Begin with `russian_roulette.py` and `single_sample_rff.py`. It may import `exact` and below.
"""

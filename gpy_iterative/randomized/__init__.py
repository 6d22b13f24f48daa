"""Estimators that truncate at random and correct for it: Russian-roulette CG and single-sample random features.

Begin with `russian_roulette.py` and `single_sample_rff.py`; `truncation.py` has the distributions of where a series
stops. The room may import `exact` and all below it, and no other method.
"""

"""Kernel matrices with compressed far blocks, whose products cost O(n).

Begin with `tree.py` (near and far blocks), `skeletons.py` (compression) and `levels.py` (products). Rows are picked
with index_select, several times as fast as indexing. It may import what `linear_operators` may.
"""

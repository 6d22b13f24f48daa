"""Kernel matrices whose far blocks pass through a few points: products whose cost grows with the number of rows.

Begin with `tree.py` and `pairs.py`, which blocks are near and far; `skeletons.py`, what far blocks pass through; and
`levels.py`, the products. `plan.py` chooses depth and ranks, `radial.py` makes the tiles of a radial operator of it. It may
import what `linear_operators` may.
"""

"""Kernel matrices with compressed far blocks; a product's cost grows with the number of rows.

Begin with `tree.py` (near and far blocks), `skeletons.py` (compression) and `levels.py` (products).
`plan.py` chooses depth and ranks; `radial.py` has the tiles. It may import what `linear_operators` may.
"""

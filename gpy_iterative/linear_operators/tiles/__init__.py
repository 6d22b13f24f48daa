"""Kernel matrices in square tiles.

Begin with `tiles.py` (tiles and their products) and `operator.py` (the linear operator). `cache.py` keeps tiles,
`ranks.py` shares them between processes. It may import what `linear_operators` may, and its modules
`products` and `extensions`.
"""

"""Kernel matrices in square tiles: evaluated, kept, multiplied, and shared by threads and processes.

Begin with `tiles.py`, the tiles and the products made of them, and `operator.py`, the linear operator on top.
`cache.py` keeps tiles, `ranks.py` shares them between processes. It may import what
`linear_operators` may, and of that room `linear_operators/products.py` and `linear_operators/extensions.py`.
"""

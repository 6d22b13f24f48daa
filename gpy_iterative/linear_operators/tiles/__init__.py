"""Kernel matrices in square tiles: evaluated, kept, multiplied, and shared by threads and processes.

Begin with `tiles.py`, the tiles and the products made of them, and `operator.py`, the linear operator on top;
`cache.py` keeps tiles. It may import `errors`, `checks`, `worker_threads` and `linear_operators/products.py`.
"""

"""Kernel matrices in square tiles.

Begin with `tiles.py` and `operator.py` (the linear operator). `ranks.py` shares tiles between processes. It may import
what `linear_operators` may, and its modules `products` and `extensions`.
"""

"""Commands for a table of one's own: `python -m gpy_iterative fit my.csv --target price`, then `predict`.

Begin with `commands.py`, which has both from beginning to end; `columns.py` turns cells into numbers, `model.py` is the
Gaussian process and its file. It may import everything below it: the faces, `fitting/` and what that may import. Nothing
imports it but `__main__.py` of the package.
"""

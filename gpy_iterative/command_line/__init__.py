"""Commands for CSV tables: `python -m gpy_iterative fit my.csv --target price`, then `predict`.

Begin with `commands.py`; `columns.py` encodes cells, `model.py` is the Gaussian process and its file. It may import
everything below it: the public modules, `fitting/` and its imports. Only `__main__.py` imports it.
"""

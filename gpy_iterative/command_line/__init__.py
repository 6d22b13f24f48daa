"""Commands for CSV tables: `python -m gpy_iterative fit my.csv --target price`, then `predict`.

Begin with `commands.py`; `model.py` is the Gaussian process and its file. It may import the public modules, `fitting/` and
below. Only `__main__.py` imports it.
"""

"""Commands for CSV tables: `python -m gpy_iterative fit my.csv --target price`, then `predict`.

Begin with `commands.py`. It may import the public modules, `fitting/` and below.
"""

"""What the methods share: reports, the state of a run, checks of data, the gradient's surrogate, progress.

Begin with `run.py` (the state of a run) and `surrogate.py` (how a gradient reaches the parameters). The room may
import `linear_solvers` and all below it.
"""

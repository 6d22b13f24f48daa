"""Steps to the optimum, and their curvature.

Begin with `levenberg_marquardt.py`; `average_information.py` and `quasi_newton.py` are its curvatures; `adam.py` has none.
It may import coordinates, supports and stopping rules of `fitting/`.
"""

"""Latent values that are known exactly between steps, as control variates for sampled features.

Begin with `known_latent.py`, which keeps them right while weights move; `kept_rows.py` and `known_points.py` say where,
`estimate.py` uses them. The room may import what `quadruply` may.
"""

"""Feature bases. Begin with `feature_basis.py`, the interface. It may import what `quadruply` may."""

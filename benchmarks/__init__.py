"""Benchmarks and the demo: `python -m benchmarks --help`. Every speed claim of the documentation comes from here."""

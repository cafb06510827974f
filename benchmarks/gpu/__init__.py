"""Benchmarks on one GPU: `python benchmarks/gpu/run.py`."""

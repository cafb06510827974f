"""Benchmarks on one GPU: `python benchmarks/run.py --device cuda`."""

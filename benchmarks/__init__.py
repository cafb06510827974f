"""Benchmarks of tritonemb against its peers; `python -m benchmarks.run` measures and reports them all."""

"""Measurements: contenders in turns on one clock, workloads, peers, results and what is drawn from them."""

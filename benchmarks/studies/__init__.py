"""Studies, each run once by hand: accuracy beside peers, and large clusters on paper."""

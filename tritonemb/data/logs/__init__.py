"""Logs of clicks that need not fit in memory: found, cut into chunks, parsed, numbered, split, shuffled."""

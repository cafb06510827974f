"""Small data sets in memory: two that are public, and one with a known ground truth."""

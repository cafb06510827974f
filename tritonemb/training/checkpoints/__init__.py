"""How checkpoints are written, found, checked and read; `tritonemb.training.checkpoint` gathers the names."""

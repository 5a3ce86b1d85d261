"""Training: one step on one page (`step`), the loop around it (`loop`), optimizer, checkpoints, metrics."""

"""Comparison of two checkpoints, or of a run with a checkpoint."""

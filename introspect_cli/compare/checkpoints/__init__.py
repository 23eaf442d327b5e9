"""Two checkpoints, or a run beside a checkpoint."""

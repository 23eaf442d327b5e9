"""Rules over one run."""

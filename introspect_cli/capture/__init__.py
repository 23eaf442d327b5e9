"""Watching a training script: the session, its options and schedule, and one probe a file."""

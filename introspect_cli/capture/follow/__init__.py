"""Captures in processes that a launcher, a shell script or a test runner starts."""

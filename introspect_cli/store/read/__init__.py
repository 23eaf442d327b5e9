"""Runs opened for reading, while they are written or after."""

"""Runs in the formats of others, out and in."""

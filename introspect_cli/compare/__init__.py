"""Comparison of two runs: alignment, tolerance, divergence, settings."""

"""Alignment: sites, steps, offset, coverage, distance, noise."""

"""Alignment: sites, steps, what a step began with, coverage, distance, noise."""

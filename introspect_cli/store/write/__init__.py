"""Runs open for writing."""

"""Compiled, scripted, traced and exported regions: their graphs, and taps inside of them."""

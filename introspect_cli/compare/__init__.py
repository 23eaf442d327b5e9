"""Two runs side by side: alignment, tolerance, divergence, settings."""

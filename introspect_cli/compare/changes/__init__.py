"""Which statements, files, settings and packages changed between two runs."""

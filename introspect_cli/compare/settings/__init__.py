"""Settings of two runs that differ, and how well each explains a divergence."""

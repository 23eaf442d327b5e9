"""From step to step: the passes in their order, which divergence is the first, and where others begin."""

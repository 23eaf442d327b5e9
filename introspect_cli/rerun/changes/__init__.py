"""Which of the changes between two runs makes them diverge."""

"""A run that goes on from where the other has been: from which step, how it began, and what was restored."""

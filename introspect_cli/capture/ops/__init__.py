"""Single operators: which ran, where, and what they gave."""

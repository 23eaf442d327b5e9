"""All ranks of a run as if one process had recorded it."""

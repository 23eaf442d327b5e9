"""Where a script runs again: copies of its project, and work trees of a commit."""

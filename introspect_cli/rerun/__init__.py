"""Running a recorded script again: other commits, other settings, or the same with more to see."""

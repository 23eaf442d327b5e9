"""What is watched, a probe a file, and what every probe shares."""

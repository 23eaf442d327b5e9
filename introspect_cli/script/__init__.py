"""Running somebody's script as python does, and what a script can say itself."""

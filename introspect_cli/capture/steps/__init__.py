"""When a step begins and ends, and what it is for."""

"""What is recorded of a step, on its way from a probe to the store."""

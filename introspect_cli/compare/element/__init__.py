"""Two whole tensors, element by element."""

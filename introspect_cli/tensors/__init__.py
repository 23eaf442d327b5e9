"""What is kept of a tensor: checksum, statistics, sketch; and the paths of tensors inside nested values."""

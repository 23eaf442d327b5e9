"""Summaries of tensors on a GPU: kernels in Triton, prepared launches, rows that come to the host a step later."""

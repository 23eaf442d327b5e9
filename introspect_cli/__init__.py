"""Capture PyTorch training runs and find where two of them first part."""

__version__ = "0.1.0"

"""Capture PyTorch training runs and find where two of them first part."""

from introspect_cli.clock import step

__version__ = "0.1.0"

__all__ = ["__version__", "step"]

"""Capture PyTorch training runs and find where two of them first part."""

from __future__ import annotations

from typing import Any

from introspect_cli.clock import step

__version__ = "0.1.0"

__all__ = ["__version__", "compare_transformed", "step"]


def __getattr__(name: str) -> Any:
    """What needs more than this file is imported when it is first asked for: `import introspect_cli` stays cheap."""
    if name == "compare_transformed":
        from introspect_cli.transformed import compare_transformed

        return compare_transformed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Capture PyTorch training runs and find where two of them first diverge."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from introspect_cli.script.calls import phase, record, step
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from introspect_cli.api import compare_transformed, diff, open_run, recording

__all__ = ["__version__", "compare_transformed", "diff", "open_run", "phase", "record", "recording", "step"]

_FROM_API = ("compare_transformed", "diff", "open_run", "recording")


def __getattr__(name: str) -> Any:
    """Import a name of `_FROM_API` when it is asked for, so that importing the package stays cheap."""
    if name in _FROM_API:
        return getattr(import_module("introspect_cli.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

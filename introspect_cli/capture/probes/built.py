"""Where loaders, schedulers and gradient scalers are built."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from introspect_cli.capture.ops.calls import Places
from introspect_cli.capture.probes.base import Patches

if TYPE_CHECKING:
    from types import FrameType

    from introspect_cli.capture.context import Context

_MADE: tuple[tuple[str, Any, str], ...] = (
    ("loaders", DataLoader, ""),
    *(
        ("schedulers", lr_scheduler, name)
        for name in ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")
    ),
    ("scalers", torch.amp, "GradScaler"),
)
"""What is described, and the class whose `__init__` all of them go through."""


class BuiltProbe:
    """Notes what is built, and the line."""

    name = "built"

    def __init__(self, context: Context) -> None:
        """Watch nothing yet."""
        self._built = context.built
        self._guarded = context.guard.around(self.name, "what loaders and schedulers are built with is")
        self._patches = Patches()
        self._places = Places()

    def install(self) -> None:
        """Replace the functions that make them."""
        for kind, home, name in _MADE:
            cls = getattr(home, name, None) if name else home
            if cls is not None and "__init__" in vars(cls):
                self._patches.replace(cls, "__init__", self._making(kind, vars(cls)["__init__"]))
        self._guarded.on = True

    def remove(self) -> None:
        """Put the functions back."""
        self._guarded.on = False
        self._patches.remove()

    def _making(self, kind: str, made: Any) -> Any:
        probe = self

        @functools.wraps(made)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands in for the class's own
            made(self, *args, **kwargs)
            if probe._guarded.on:
                with probe._guarded:
                    probe.made(kind, self, sys._getframe(1))  # noqa: SLF001 - as python documents it

        return __init__

    def made(self, kind: str, thing: object, frame: FrameType) -> None:
        """One was built, by code at a frame."""
        line = self._places.line(frame)
        if kind == "loaders":
            self._built.lines.set(thing, line)
        else:
            self._built.note(kind, thing, line)

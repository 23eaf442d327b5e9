"""Where loaders, schedulers and gradient scalers are built."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from introspect_cli.capture.ops.calls import Places
from introspect_cli.capture.probes.base import GuardedProbe

if TYPE_CHECKING:
    from collections.abc import Callable
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


class BuiltProbe(GuardedProbe):
    """Notes what is built, and the line."""

    name = "built"
    lost = "what loaders and schedulers are built with is"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._places = Places()

    def install(self) -> None:
        """Watch what makes them."""
        for kind, home, name in _MADE:
            cls = getattr(home, name, None) if name else home
            if cls is not None and "__init__" in vars(cls):
                self._patches.watch(cls, "__init__", self._guarded, functools.partial(self._making, kind))
        super().install()

    def _making(self, kind: str, args: tuple[Any, ...], _: object) -> Callable[[Any], None]:
        frame = sys._getframe(2)  # noqa: SLF001 - as python documents it
        return lambda _: self.made(kind, args[0], frame)

    def made(self, kind: str, thing: object, frame: FrameType) -> None:
        """One was built, by code at a frame."""
        line, built = self._places.line(frame), self._context.built
        if kind == "loaders":
            built.lines.set(thing, line)
        else:
            built.note(kind, thing, line)

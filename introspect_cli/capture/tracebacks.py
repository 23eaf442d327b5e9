"""Tracebacks that the script itself shows, without our frames.

A script that catches an exception and prints or logs it would show the functions that stand between its modules and
torch's, and bare python would not. So for as long as a capture lasts, what `traceback` (and with it `logging`) walks
leaves them out. An exception of our own, whose last frame is ours, is shown whole, unless that frame stands in for a
function written in C, which raised it.
"""

from __future__ import annotations

import itertools
import traceback
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.frames import PACKAGE, is_ours
from introspect_cli.capture.probes.base import Patches, stands_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_RUNNER = PACKAGE + "script/run.py"
"""Where the script's first frame is called from; python alone has nothing below it."""
_WALKS = ("walk_tb", "_walk_tb_with_full_positions")
"""Functions that walk a traceback; the second is new in Python 3.11, and what the module itself uses from then on."""


class TracebackFilter:
    """Replaces the functions that walk tracebacks and stacks."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self) -> None:
        """Leave our frames out from now on."""
        for name in _WALKS:
            walk = getattr(traceback, name, None)
            if walk is not None:
                self._patches.replace(traceback, name, _walks_traceback(walk))
        self._patches.replace(traceback, "walk_stack", _walks_stack(traceback.walk_stack))

    def remove(self) -> None:
        """Put the functions back."""
        self._patches.remove()


def _walks_traceback(walk: Callable[[Any], Iterator[tuple[FrameType, Any]]]) -> Callable[[Any], Any]:
    def walked(tb: Any) -> Iterator[tuple[FrameType, Any]]:
        entries = list(walk(tb))
        if entries and is_ours(entries[-1][0]) and not stands_in(entries[-1][0]):
            return iter(entries)
        return iter([entry for entry in entries if not is_ours(entry[0])])

    return walked


def _walks_stack(walk: Callable[[FrameType | None], Iterator[tuple[FrameType, int]]]) -> Callable[..., Any]:
    def walked(f: FrameType | None) -> Iterator[tuple[FrameType, int]]:
        if f is None:
            return walk(None)  # it counts frames to find its caller
        entries = itertools.takewhile(lambda entry: entry[0].f_code.co_filename != _RUNNER, walk(f))
        return iter([entry for entry in entries if not is_ours(entry[0])])

    return walked

"""A progress line on a terminal's stderr for who asks for one; it would spoil what a script writes there itself."""

from __future__ import annotations

import os
import sys
import time

_INTERVAL = 0.5
_FIRST = 2.0


class Progress:
    """One line, rewritten in place: steps, rate, records, bytes."""

    def __init__(self, *, wanted: bool) -> None:
        """Stay silent unless asked for, or where stderr is no terminal."""
        try:
            self._shown = wanted and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        except (AttributeError, ValueError):
            self._shown = False
        self._began = time.monotonic()
        self._next = self._began + _FIRST
        self._drawn = False

    def update(self, step: int, records: int, size: int) -> None:
        """Redraw, at most twice a second, and not at all in captures that are over at once."""
        if not self._shown:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        rate = step / max(now - self._began, 1e-9)
        self._write(f"\r\x1b[2Kintrospect: step {step:,} · {rate:.1f}/s · {records:,} records · {human_size(size)}\r")
        self._drawn = True

    def clear(self) -> None:
        """Take the line away."""
        if self._drawn:
            self._drawn = False
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError, UnicodeError):
            self._shown = False


def human_size(size: float) -> str:
    """A number of bytes in a unit that keeps it short."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"

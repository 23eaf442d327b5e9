"""What processes that were followed leave for the capture that waits: a file each, written whole or not at all.

Everything a process imports from here it imports before its first line, so this needs nothing but json.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "INTROSPECT_FOLLOW"
"""The environment variable that tells processes what to do."""


@dataclass(frozen=True)
class Note:
    """What one process did.

    Attributes:
        name: its script or module.
        state: `started` (no torch yet), `recording`, `finished` or `failed`.
        run: where it records.
        said: sentences for the person who waits.
    """

    name: str
    state: str
    run: str = ""
    said: list[str] = field(default_factory=list)

    def leave(self, folder: str) -> None:
        """Write it, in the place of what this process wrote before; a directory that is not there is no mistake."""
        path = Path(folder) / f"{os.getpid()}.json"
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(vars(self)), encoding="utf-8")
            part.replace(path)


def notes_in(folder: Path) -> list[Note]:
    """What processes left, in the order in which they last wrote."""
    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [Note(**json.loads(path.read_text(encoding="utf-8"))) for path in found]

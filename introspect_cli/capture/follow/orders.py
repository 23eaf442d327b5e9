"""What a capture that follows and the python processes below it tell each other.

What is to be done has to reach grandchildren through launchers that know nothing of us, on other machines too, so it is
text in the environment. What came of it is a file that each process leaves for the capture that waits, written whole or
not at all.

Everything that is imported here at the top, a process imports before its first line, so it is little.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from introspect_cli.capture.options import CaptureOptions


@dataclass(frozen=True)
class Note:
    """State of one followed process, as it reports it.

    Attributes:
        name: its script or module.
        state: `started` (no torch yet), `recording`, `finished` or `failed`.
        run: where it records.
        said: sentences for the person who waits.
        code: the exit status that a comparison asks for; None where none was to.
    """

    name: str
    state: str
    run: str = ""
    said: list[str] = field(default_factory=list)
    code: int | None = None

    def leave(self, folder: str) -> None:
        """Write the note to `folder` as `<pid>.json`, replacing this process's last one; a failure is ignored."""
        path = Path(folder) / f"{os.getpid()}.json"
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(vars(self)), encoding="utf-8")
            part.replace(path)


def notes_in(folder: Path) -> list[Note]:
    """Notes that processes left in a directory, the last of each, sorted by when they were written, oldest first."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [Note(**json.loads(path.read_text(encoding="utf-8"))) for path in files]


def order_of(options: CaptureOptions, **rest: Any) -> str:
    """Instructions to python processes below a capture, as text in the environment: JSON.

    Args:
        options: of the capture; `output` is absolute.
        rest: `notes`, the directory for notes; `paths`, what PYTHONPATH was before, None where it was not set;
            `launcher`, the command that was captured, without secrets, empty where there is none but the script; and
            `launched_in`, the directory where it runs.
    """
    from introspect_cli.capture.options import plain

    packed = {item.name: plain(getattr(options, item.name)) for item in fields(options)}
    return json.dumps({"options": packed, **rest}, default=str)


def options_in(order: dict[str, Any]) -> CaptureOptions:
    """The capture's options in what was read from the text that `order_of` made.

    Raises:
        ValueError, KeyError, TypeError: it is no order.
    """
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.records import Kind
    from introspect_cli.schedule.rules import parse_rule

    packed = order["options"]
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in packed.items()
    }
    values["record"] = frozenset(Kind(name) for name in packed["record"])
    values["steps"] = parse_rule(packed["steps"])
    values["output"] = Path(packed["output"]) if packed["output"] is not None else None
    return CaptureOptions(**values)

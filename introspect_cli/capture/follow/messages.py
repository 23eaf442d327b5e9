"""What a capture that follows and the processes below it tell each other: an order down, a note back.

The order has to reach grandchildren through launchers that know nothing of us, on other machines too, so it is text in
the environment. A note is a file that each process leaves for the capture that waits, written whole or not at all.

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
        code: the exit status that a comparison asks for; None where none was to.
    """

    name: str
    state: str
    run: str = ""
    said: list[str] = field(default_factory=list)
    code: int | None = None

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


@dataclass(frozen=True)
class Order:
    """What to do in processes below.

    Attributes:
        options: of the capture; `output` is absolute.
        notes: the directory for notes.
        paths: what PYTHONPATH was before; None where it was not set.
        launcher: the command that was captured, without secrets; empty where there is none but the script.
        launched_in: the directory where it runs.
    """

    options: CaptureOptions
    notes: str
    paths: str | None = None
    launcher: tuple[str, ...] = ()
    launched_in: str = ""

    def text(self) -> str:
        """The order as text."""
        return json.dumps({**vars(self), "options": _packed(self.options)})

    @classmethod
    def parse(cls, text: str) -> Order:
        """The order in a text that `text` made.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        document = json.loads(text)
        launcher = tuple(document.get("launcher", ()))
        told = (document["notes"], document["paths"], launcher, document.get("launched_in", ""))
        return cls(_unpacked(document["options"]), *told)


def _packed(options: CaptureOptions) -> dict[str, Any]:
    from introspect_cli.schedule.rules import Schedule

    packed = {}
    for item in fields(options):
        value = getattr(options, item.name)
        if isinstance(value, frozenset):
            value = [kind.value for kind in value]
        elif isinstance(value, (Path, Schedule)):
            value = str(value)
        packed[item.name] = value
    return packed


def _unpacked(packed: dict[str, Any]) -> CaptureOptions:
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.records import Kind
    from introspect_cli.schedule.rules import Schedule

    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in packed.items()
    }
    values["record"] = frozenset(Kind(name) for name in packed["record"])
    values["steps"] = Schedule(packed["steps"])
    values["output"] = Path(packed["output"]) if packed["output"] is not None else None
    return CaptureOptions(**values)

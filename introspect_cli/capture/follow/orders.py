"""What a capture that follows tells the processes below it.

The order has to reach grandchildren through launchers that know nothing of us, on other machines too, so it is text in
the environment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from introspect_cli.capture.options import CaptureOptions
from introspect_cli.records import Kind
from introspect_cli.schedule import Schedule


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
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in packed.items()
    }
    values["record"] = frozenset(Kind(name) for name in packed["record"])
    values["schedule"] = Schedule.parse(packed["schedule"])
    values["output"] = Path(packed["output"]) if packed["output"] is not None else None
    return CaptureOptions(**values)

"""Where an operator was called from: the user's line, ours, or a compiled region.

Frames are walked only for calls that were not met before, and each code object is judged once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from introspect_cli.capture import private_api
from introspect_cli.capture.environment import sources

if TYPE_CHECKING:
    from types import CodeType, FrameType

_ENGINE = os.path.join("torch", "autograd", "graph.py")  # noqa: PTH118 - the end of a file name, no path
_DEEPEST = 200


class Places:
    """Judges code objects, and remembers."""

    def __init__(self) -> None:
        """Start with nothing judged."""
        self._files: dict[CodeType, str | None] = {}
        self._ours: dict[int, tuple[CodeType, bool]] = {}

    def is_ours(self, frame: FrameType) -> bool:
        """Whether an operator is called by code of this package (its own reads are no part of the step)."""
        code = frame.f_code
        judged = self._ours.get(id(code))  # the hash of a code object goes through all of its constants
        if judged is None:
            judged = self._ours[id(code)] = (code, code.co_filename.startswith(sources.OURS))
        return judged[1]

    def line(self, frame: FrameType | None, *, through: bool = False) -> str:
        """`file:line` of the innermost frame of the user's, "" where there is none this side of a backward pass.

        Args:
            frame: where to begin.
            through: whether to go on to the line that started the backward pass.
        """
        for _ in range(_DEEPEST):
            if frame is None:
                return ""
            code = frame.f_code
            name = self._files.get(code)
            if name is None:
                path = code.co_filename
                if path.endswith(_ENGINE) and not through:
                    return ""
                name = self._files[code] = sources.relative(path) if sources.is_users(path) else ""
            if name:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def in_compiled_call(frame: FrameType | None) -> bool:
    """Whether a frame was called, at any depth, by a region that `torch.compile` made."""
    entries = private_api.compiled_entries()
    for _ in range(_DEEPEST if entries else 0):
        if frame is None:
            return False
        if id(frame.f_code) in entries:
            return True
        frame = frame.f_back
    return False

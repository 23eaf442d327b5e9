"""Our frames, kept from Dynamo.

What stands between the script and torch (replaced functions) runs while Dynamo looks at frames, and has to: the frames
of the script and of torch below ours are to be compiled as they would be alone. So each code object of ours is marked
as one to pass by. A function of ours that is called inside a region that is being traced is inlined as before. What
runs in our sections is left alone by `pausing`.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from introspect_cli.capture import private_api
from introspect_cli.capture.pausing import PAUSE
from introspect_cli.capture.probes.base import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = __name__.partition(".")[0]
_passed: set[str] = set()


def pass_by() -> None:
    """Mark the code of all our modules that are loaded, and have Dynamo pause where they work."""
    if private_api.compiler_callback is not None and private_api.set_compiler_callback is not None:
        PAUSE.learn(private_api.compiler_callback, private_api.set_compiler_callback)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _NAME and name not in _passed:
            _passed.add(name)
            for code in _codes(list(vars(module).values()), name):
                private_api.pass_by(code)


def _codes(values: list[object], module: str) -> Iterator[CodeType]:
    while values:
        value = values.pop()
        if isinstance(value, CodeType):
            if value.co_filename.startswith(PACKAGE):
                yield value
                values.extend(value.co_consts)
        elif isinstance(value, (staticmethod, classmethod)):
            values.append(value.__func__)
        elif isinstance(value, property):
            values.extend((value.fget, value.fset))
        elif isinstance(value, FunctionType):
            values.append(value.__code__)
        elif isinstance(value, type) and value.__module__ == module:
            values.extend(vars(value).values())

"""What the script calls an object: the variable that holds it, or a place in a container or an object that one holds.

Neither a tensor nor a model knows its name, but a variable of a frame under way does. Frames of the script's own files
alone are looked at, and past any method of its classes: only exact dictionaries, lists and tuples are looked into.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.environment.sources import file_of, is_users
from introspect_cli.capture.frames import outward

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

_MOST_ITEMS = 1000
_CONTAINERS = (list, tuple, dict)
_HAND_OUT_LOCALS = frozenset({"locals", "vars"})


def called(wanted: set[int], kind: type, frames: Iterable[FrameType], *, plain_first: bool = False) -> dict[int, str]:
    """What the script calls objects, by identity; where several names hold one, the first of the first frame.

    Args:
        wanted: identities of the objects.
        kind: the class they are of.
        frames: where to look, the frame that is to be asked first before the others.
        plain_first: of one frame's, rather a variable than a place in what a variable holds, whichever came first. Not
            for what is asked for at every step: a loop's variable holds another object then.
    """
    names: dict[int, str] = {}
    for frame in frames:
        for variables in (_locals(frame), frame.f_globals):
            matches = [(name, value) for name, value in _named(variables, kind) if id(value) in wanted]
            if plain_first:
                matches.sort(key=lambda pair: not pair[0].isidentifier())
            for name, value in matches:
                names.setdefault(id(value), name)
        if len(names) == len(wanted):
            break
    return names


def held(kind: type | tuple[type, ...], frames: Iterable[FrameType]) -> Iterator[tuple[str, Any]]:
    """All objects of a class that frames have in variables, with what the script calls them."""
    for frame in frames:
        for variables in (_locals(frame), frame.f_globals):
            yield from ((name, value) for name, value in _named(variables, kind) if issubclass(type(value), kind))


def script_frames() -> Iterator[FrameType]:
    """The frames that run code of the script's, the innermost first."""
    return (frame for frame in outward(sys._getframe(1)) if is_users(frame.f_code.co_filename))  # noqa: SLF001 - the documented way to a frame


def _named(variables: dict[str, Any], kind: type | tuple[type, ...]) -> Iterator[tuple[str, object]]:
    for name, value in list(variables.items()):
        if name.startswith("__"):
            continue
        cls = type(value)
        if cls in _CONTAINERS:
            if len(value) <= _MOST_ITEMS:
                items = value.items() if cls is dict else enumerate(value)
                yield from ((f"{name}[{key!r}]", item) for key, item in items if type(key) in (int, str))
        elif issubclass(cls, kind):
            yield name, value
        elif not issubclass(cls, type) and _of_script(str(cls.__module__)):
            yield from ((f"{name}.{key}", item) for key, item in _attributes(value).items())


@functools.cache
def _of_script(module: str) -> bool:
    return is_users(file_of(sys.modules.get(module)))


def _attributes(value: object) -> dict[str, Any]:
    """What an object holds, read past any method of its class."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def _locals(frame: FrameType) -> dict[str, Any]:
    """A frame's variables. Python below 3.13 keeps what it is asked for in the frame; we leave no object there.

    The dictionary that it keeps is the one that `locals()` gives: where code asks for that, it is not ours to fill.
    """
    code = frame.f_code
    below = sys.version_info < (3, 13) and bool(code.co_flags & inspect.CO_OPTIMIZED)
    if below and not _HAND_OUT_LOCALS.isdisjoint(code.co_names):
        return {}
    kept = frame.f_locals
    variables = dict(kept)
    if below:
        kept.clear()
    return variables

"""Frames: those of introspect told from the script's and kept from Dynamo, and what the script's call an object.

Where a region of the script's has a graph break, Dynamo goes on looking at every frame that has a tensor or an array in
it, ours, torch's and numpy's below ours included. It would compile them: that takes seconds, changes the numbers of the
script's regions, warns of what it finds, and can fail. So each guarded section takes Dynamo's callback off this thread
and puts it back at the end. Where there is none, that costs one question.

What stands between the script and torch (replaced functions) runs while Dynamo looks at frames, and has to: the frames
of the script and of torch below are to be compiled as they would be alone. So each code object of introspect is marked
as one to pass by. One of its functions that is called inside a region that is being traced is inlined as before.

Neither a tensor nor a model knows its name, but a variable of a frame under way does: it holds the object, or a
container or an object that one holds. Frames of the script's own files alone are looked at, and past any method of its
classes: only exact dictionaries, lists and tuples are looked into.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from itertools import accumulate, islice, repeat, takewhile
from operator import is_not
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.environment.sources import Project, attributes_of, file_of, is_users, relative
from introspect_cli.script.ending import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType


_NAME = __name__.partition(".")[0]
_passed: set[str] = set()


def is_introspects(frame: FrameType) -> bool:
    """Whether a frame's code lies in this package."""
    return frame.f_code.co_filename.startswith(PACKAGE)


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers, the innermost first.

    No generator: while one that is not exhausted is closed, python drops an exception that another thread sends.
    """
    frames: Iterator[Any] = accumulate(repeat(frame), lambda each, _: each.f_back)
    return takewhile(functools.partial(is_not, None), frames)


class Pause:
    """Takes Dynamo's frame callback off a thread during guarded sections."""

    def __init__(self) -> None:
        """Start without access to Dynamo, which `pass_by` gives."""
        self.asked: Callable[[], Any] = lambda: None
        """This thread's callback."""
        self.exchange: Callable[[Any], Any] = lambda _callback: None
        """Sets it, and returns the one that was set before."""
        self.taken: dict[int, list[Any]] = {}
        """Callbacks to restore, by thread."""

    def begin(self) -> None:
        """Take this thread's callback off as a section begins; `end` puts it back.

        Sections nest, so each thread has a stack. Call it only where `taken` is not empty or `asked()` is not None.
        """
        thread = threading.get_ident()
        if thread in self.taken or self.asked() is not None:
            self.taken.setdefault(thread, []).append(self.exchange(None))

    def end(self) -> None:
        """Put back what the last `begin` of this thread took off; nothing where it took none."""
        taken = self.taken.get(threading.get_ident())
        if taken is not None:
            self.exchange(taken.pop())
            if not taken:
                del self.taken[threading.get_ident()]


PAUSE = Pause()
"""Shared by the process."""


def pass_by() -> None:
    """Have Dynamo skip the code of all loaded modules of introspect, and let `PAUSE` take its callback off.

    Each module's code is marked once. Imports torch.
    """
    from introspect_cli.capture import private_api  # it imports torch, as the script has by now

    if private_api.compiler_callback is not None and private_api.set_compiler_callback is not None:
        PAUSE.asked, PAUSE.exchange = private_api.compiler_callback, private_api.set_compiler_callback
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _NAME and name not in _passed:
            _passed.add(name)
            for code in _codes(list(vars(module).values()), name):
                private_api.pass_by(code)


def _codes(values: list[object], module: str) -> Iterator[CodeType]:
    """Code objects of this package in a module's values, with code nested in them. Empties `values`.

    Args:
        values: functions, methods, properties and classes; anything else is ignored.
        module: name of the module; classes of others are not looked into.
    """
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


MAX_ITEMS = 1000
_CONTAINERS = (list, tuple, dict)
_HAND_OUT_LOCALS = frozenset({"locals", "vars", "f_locals"})
_FRAME_ALONE = 3
"""References to a dictionary that a frame has, a variable has, and `sys.getrefcount` is given."""


def variable_names(
    wanted: set[int], kind: type, frames: Iterable[FrameType], *, plain_first: bool = False
) -> dict[int, str]:
    """Names by `id` for those of the `wanted` objects that a variable leads to, such as `model` or `cfg['net']`.

    The first name found counts: frames in order, in each its locals, then its globals. Nothing deeper than one level
    inside a variable is found; an object without a name has no entry.

    Args:
        wanted: identities of the objects.
        kind: the class they are of.
        frames: where to look; the search ends with the frame where all are found.
        plain_first: within a frame, prefer a variable (`net`) to what is inside one (`nets[0]`). Not for what is asked
            for at every step: a loop's variable holds another object then.
    """
    names: dict[int, str] = {}
    for frame in frames:
        for name, value in instances_in(kind, [frame], plain_first=plain_first):
            if id(value) in wanted:
                names.setdefault(id(value), name)
        if len(names) == len(wanted):
            break
    return names


def instances_in(
    kind: type | tuple[type, ...], frames: Iterable[FrameType], *, plain_first: bool = False
) -> Iterator[tuple[str, Any]]:
    """Name and object for each instance of `kind` in the frames' variables, or one level inside these.

    An object that several variables hold comes several times. `plain_first` is as for `variable_names`.
    """
    for frame in frames:
        for variables in (variables_of(frame), frame.f_globals):
            found = [pair for pair in _named_values(variables, kind) if issubclass(type(pair[1]), kind)]
            yield from sorted(found, key=lambda pair: plain_first and not pair[0].isidentifier())


def script_frames() -> Iterator[FrameType]:
    """The caller's frame and its callers, the innermost first, without those whose code is not in the user's files."""
    return filter(lambda frame: is_users(frame.f_code.co_filename), outward(sys._getframe(1)))  # noqa: SLF001 - the documented way to a frame


def _named_values(variables: dict[str, Any], kind: type | tuple[type, ...]) -> Iterator[tuple[str, object]]:
    """Name and value of variables of `kind`, of items of containers, and of attributes of the script's own objects.

    Containers are plain lists, tuples and dicts. Left out are those of more than 1000 items, items under keys that are
    neither integers nor texts, and variables that begin with two underscores. Items and attributes may be of any class;
    the caller selects.
    """
    for name, value in list(variables.items()):
        if name.startswith("__"):
            continue
        cls = type(value)
        if cls in _CONTAINERS:
            if len(value) <= MAX_ITEMS:
                items = value.items() if cls is dict else enumerate(value)
                yield from ((f"{name}[{key!r}]", item) for key, item in items if type(key) in (int, str))
        elif issubclass(cls, kind):
            yield name, value
        elif not issubclass(cls, type) and _of_script(str(cls.__module__)):
            yield from ((f"{name}.{key}", item) for key, item in attributes_of(value).items())


@functools.cache
def _of_script(module: str) -> bool:
    """Whether a module's file is the user's; cached by the module's name."""
    return is_users(file_of(sys.modules.get(module)))


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's local variables; {} for a frame that calls `locals()` or `vars()` on Python below 3.13.

    Python below 3.13 keeps the dictionary that it gives in the frame, and all objects in it alive; so it is emptied
    again, except of what `exec` has put there and where a caller (`currentframe().f_back.f_locals`) has taken it.
    """
    code = frame.f_code
    below = sys.version_info < (3, 13) and bool(code.co_flags & inspect.CO_OPTIMIZED)
    if below and not _HAND_OUT_LOCALS.isdisjoint(code.co_names):
        return {}
    kept = frame.f_locals
    variables = dict(kept)
    if below and sys.getrefcount(kept) <= _FRAME_ALONE:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            kept.pop(name, None)
    return variables


_ENGINE = os.path.join("torch", "autograd", "graph.py")  # noqa: PTH118 - the end of a file name, no path
MAX_FRAMES = 200


@functools.lru_cache(maxsize=1 << 14)
def _users_file(code: CodeType, _root: str) -> str:
    """In which file of the user's code is, as it is displayed; "" for all other code. Cached by code and project."""
    return relative(code.co_filename) if is_users(code.co_filename) else ""


def line_of(frame: FrameType | None, *, through: bool = False) -> str:
    """`file:line` of the innermost frame in the user's files; "" where none is among the first 200.

    Args:
        frame: where to begin.
        through: if False, give "" for code that a backward pass runs, at torch's engine; if True go on to the line that
            started the backward pass.
    """
    for each in islice(outward(frame), MAX_FRAMES):
        if file := _users_file(each.f_code, Project.root):
            return f"{file}:{each.f_lineno}"
        if each.f_code.co_filename.endswith(_ENGINE) and not through:
            return ""
    return ""

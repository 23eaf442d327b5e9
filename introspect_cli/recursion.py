"""The recursion limit as the script knows it.

Our own frames lie below the script's first one, and python counts them: a script would run out of levels sooner than
alone. So the limit is raised by what our frames take, and the script is told, and sets, the limit without it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def make_room(executed: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """Raise the recursion limit by what our own frames take of it, unseen by the script.

    How much that is differs from one version of python to the next, so it is found out by going down.

    Args:
        executed: whether the script will be run by `exec`, which took a level before python 3.12.

    Returns:
        what gives our own work room, however low the script has set the limit; and what puts that limit back.
    """
    tell, change = sys.getrecursionlimit, sys.setrecursionlimit
    limit = tell()
    # two levels are for measuring
    taken = limit - _levels_left() - 2 + (executed and sys.version_info < (3, 12))
    change(limit + taken)

    @functools.wraps(tell)
    def getrecursionlimit() -> int:
        return tell() - taken

    @functools.wraps(change)
    def setrecursionlimit(limit: Any, /) -> None:
        try:
            change(limit + taken if isinstance(limit, int) and limit > 0 else limit)
        except RecursionError as error:
            words = str(error)
            for number in (limit + taken, _last_number(words)):
                words = words.replace(str(number), str(number - taken))
            raise RecursionError(words) from None

    sys.getrecursionlimit, sys.setrecursionlimit = getrecursionlimit, setrecursionlimit

    asked = limit

    def room() -> None:
        nonlocal asked
        asked = tell() - taken
        change(max(tell(), limit + taken))

    def put_back() -> None:
        with contextlib.suppress(RecursionError):
            change(asked)
        if sys.getrecursionlimit is getrecursionlimit:
            sys.getrecursionlimit = tell
        if sys.setrecursionlimit is setrecursionlimit:
            sys.setrecursionlimit = change

    return room, put_back


def _last_number(words: str) -> int:
    """The depth in "cannot set the recursion limit to 5 at the recursion depth 12: the limit is too low"."""
    found = [int(word.strip(":")) for word in words.split() if word.strip(":").isdecimal()]
    return found[-1] if found else 0


def _levels_left() -> int:
    deepest = 0

    def descend() -> None:
        nonlocal deepest
        deepest += 1
        descend()

    with contextlib.suppress(RecursionError):
        descend()
    return deepest

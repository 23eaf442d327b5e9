"""A script's command line, by the names of its options: what two runs' command lines are compared by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

OPTION = re.compile(r"-(?!\.?\d).", re.DOTALL)
"""Begins the name of an option; `-3` is a number."""

ARGUMENT = "argument "
"""Begins the names of arguments that stand by themselves; no option has a space in it."""

_ASSIGNED = re.compile(r"[\w.+]+=")


def arguments(argv: Iterable[str]) -> dict[str, Any]:
    """A command line by name, in its order.

    Args:
        argv: words; `--lr 1e-3`, `--lr=1e-3` and `lr=1e-3` are alike.

    Returns:
        An option's value, True for a flag, and a list where several words follow it; `argument 0` and so on for what
        stands by itself.
    """
    values: dict[str, Any] = {}
    option, position = "", 0
    for word in argv:
        if OPTION.match(word):
            option, equals, value = word.partition("=")
            values[option] = value if equals else True
            if equals:
                option = ""
        elif option and values[option] is True:
            values[option] = word
        elif _ASSIGNED.match(word):
            name, _, value = word.partition("=")
            values[name] = value
            option = ""
        elif option:
            so_far = values[option]
            values[option] = [*so_far, word] if isinstance(so_far, list) else [so_far, word]
        else:
            values[f"{ARGUMENT}{position}"] = word
            position += 1
    return values


def command_options(argv: Iterable[str]) -> dict[str, str]:
    """A command line to compare: each option with one value, `given` for a flag, and the rest by position.

    What else follows an option is as often an argument of its own as a further value, and is never hidden by an
    option that explains nothing.
    """
    options = arguments(argv)
    alone = [value for name, value in options.items() if name.startswith(ARGUMENT)]
    named: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, list):
            named[name] = value[0]
            alone += value[1:]
        elif not name.startswith(ARGUMENT):
            named[name] = "given" if value is True else value
    return named | {f"{ARGUMENT}{position}": value for position, value in enumerate(alone)}


def argv_of(settings: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """The words of the script's command line, the script first; none where they are not on record."""
    command = settings.get("command")
    argv = command.get("argv") if isinstance(command, Mapping) else None
    if not isinstance(argv, (list, tuple)):
        argv = manifest.get("argv")
    return [str(word) for word in argv] if isinstance(argv, (list, tuple)) else []

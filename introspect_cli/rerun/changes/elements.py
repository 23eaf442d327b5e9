"""What differs between two runs and can be changed by itself: a statement, a value, a setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.settings.settings import ARGUMENT, ENV_NOISE, OPTION, arguments
from introspect_cli.store.files import REDACTED
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from introspect_cli.store.run import Run

_DOCUMENTS = {"argument": "command", "environment": "environment", "capture": "seeds"}
"""Settings document by axis; `capture` is an option of `introspect capture` that changes the run."""


@dataclass(frozen=True)
class Difference:
    """A difference between the runs that is not a text: a setting.

    Attributes:
        axis: `argument`, `environment` or `capture`.
        name: option or variable.
        a: its value in run a; None where absent. A list for options of several values, True for a flag.
        b: its value in run b.
    """

    axis: str
    name: str
    a: Any
    b: Any


Element: TypeAlias = "Change | Difference"


def on_axis(elements: Iterable[Element], axis: str) -> list[Difference]:
    """The `Difference`s of one axis, in order."""
    return [element for element in elements if isinstance(element, Difference) and element.axis == axis]


def place_of(element: Element) -> str:
    """Where an element is: `model.py:41`, `config.yaml`, `--lr`."""
    return element.place if isinstance(element, Change) else element.name


def kind_of(element: Element) -> str:
    """`statement`, `value`, ... (a change's unit), or `setting`."""
    return element.unit if isinstance(element, Change) else "setting"


def count_by_kind(elements: Collection[Element]) -> str:
    """Numbers by kind, in words: `37 changes in 6 files and 2 differing settings`; only the kinds that are there."""
    files = [element.file for element in elements if isinstance(element, Change)]
    settings = count(len(elements) - len(files), "differing setting")
    changes = f"{count(len(files), 'change')} in {count(len({*files}), 'file')}"
    return settings if not files else changes if len(files) == len(elements) else f"{changes} and {settings}"


def differing_settings(a: Run, b: Run) -> tuple[list[Difference], list[str]]:
    """The settings that differ and can be changed, and the names of those that cannot since a value is redacted.

    Arguments, environment variables and capture options, in this order, each sorted by name. Environment variables that
    say nothing of a training (`ENV_NOISE`) are left out.
    """
    changeable, secret = [], []
    for axis, document in _DOCUMENTS.items():
        one, two = (run.settings.document(document) for run in (a, b))
        if axis == "argument":
            words = (command.get("arguments") for command in (one, two))
            one, two = (arguments(map(str, given)) if isinstance(given, list) else {} for given in words)
        for name, left, right in sorted(unequal(one, two), key=lambda item: item[0]):
            if axis == "environment" and ENV_NOISE.match(name):
                continue
            if REDACTED in (left, right):
                secret.append(name)
            else:
                changeable.append(Difference(axis, name, left, right))
    return changeable, secret


def command_line(chosen: dict[str, Any]) -> list[str]:
    """Command-line words that `arguments` reads back as `chosen`: positional ones first, none for a value of None."""
    line = [str(value) for name, value in chosen.items() if name.startswith(ARGUMENT) and value is not None]
    for name, value in chosen.items():
        if name.startswith(ARGUMENT) or value is None:
            continue
        option, _, part = name.partition(" ")
        if value is True:
            line.append(option)
            continue
        first, *more = map(str, value if isinstance(value, list) else [value])
        if part and not part.startswith("("):
            first = f"{part}={first}"  # `-p lr=1`
        if more or (option.startswith("-") and first and not OPTION.match(first)):
            line += [option, first, *more]
        else:
            line.append(f"{option}={first}")
    return line

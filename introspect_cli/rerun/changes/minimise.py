"""What differs between two runs and can be changed by itself, and the smallest set of it that makes them diverge.

Two runs differ in statements, files, arguments, their environment, their seed. Running run a's command again with some
of that as in run b tells whether it suffices. Delta debugging (the `ddmin` algorithm: Zeller and Hildebrandt,
"Simplifying and isolating failure-inducing input", 2002) shrinks the set until no single one can be taken out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.settings.documents import ARGUMENT, OPTION, arguments
from introspect_cli.compare.settings.settings import ENV_NOISE
from introspect_cli.store.files.folders import REDACTED
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from introspect_cli.store.read.run import Run


_DOCUMENTS = {"argument": "command", "environment": "environment", "capture": "seeds"}
SETTINGS = tuple(_DOCUMENTS)
"""Of a difference, the axes that are settings; `capture` is an option of `introspect capture` that changes the run."""


@dataclass(frozen=True)
class Difference:
    """A difference between the runs that is not a text: setting, other file or interpreter.

    Attributes:
        axis: one of `SETTINGS`; `file`, one that is no source; or `python`, another interpreter with other packages.
        name: option, variable, or path in the project.
        a: its value in run a; None where absent. A list for options of several values, True for a flag; a file's path;
            "" for the interpreter that runs this.
        b: its value in run b.
    """

    axis: str
    name: str
    a: Any
    b: Any


Element: TypeAlias = "Change | Difference"


def on_axes(elements: Iterable[Element], *axes: str) -> list[Difference]:
    """The `Difference`s whose axis is one of `axes`, in order."""
    return [element for element in elements if isinstance(element, Difference) and element.axis in axes]


def place_of(element: Element) -> str:
    """Where an element is: `model.py:41`, `config.yaml`, `--lr`."""
    if isinstance(element, Change):
        return element.place
    return f"the interpreter {element.b}" if element.axis == "python" else element.name


def counted(elements: Collection[Element]) -> str:
    """How many there are of what kind: `37 changes in 6 files and 2 differing settings`."""
    inside = [element.file for element in elements if isinstance(element, Change)]
    inside += [element.name for element in on_axes(elements, "file")]
    settings = count(len(elements) - len(inside), "differing setting")
    if not inside:
        return settings
    changes = f"{count(len(inside), 'change')} in {count(len({*inside}), 'file')}"
    return changes if len(inside) == len(elements) else f"{changes} and {settings}"


def kind_of(element: Element) -> str:
    """`statement`, `value`, ... (a change's unit), `setting`, `other file` or `python`."""
    if isinstance(element, Change):
        return element.unit
    return {"python": "python", "file": "other file"}.get(element.axis, "setting")


Item = TypeVar("Item")


def ddmin(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> Sequence[Item]:
    """A subset on which `fails` is true and of which no single item can be left out (delta debugging).

    Args:
        items: a set on which `fails` is true; the likeliest first, since these are asked about first.
        fails: the question; asked of subsets, in order, and never of the empty one.
    """
    parts = 2
    while len(items) > 1:
        size = max(len(items) // parts, 1)
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        rests = [[item for item in items if item not in chunk] for chunk in chunks]
        smaller = next((chunk for chunk in chunks if len(chunk) < len(items) and fails(chunk)), None)
        if smaller is not None:
            items, parts = smaller, 2
            continue
        smaller = next((rest for rest in rests if 0 < len(rest) < len(items) and len(chunks) > 2 and fails(rest)), None)
        if smaller is not None:
            items, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(parts * 2, len(items))
    return items


def differences(a: Run, b: Run) -> tuple[list[Difference], list[str]]:
    """The settings that differ and can be changed, and the names of those that cannot since their value is secret."""
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
    """Command-line words that `arguments` reads back as `chosen`; positional words first."""
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

"""What differs between two runs and can be changed by itself, and the smallest set of it that makes them diverge.

Two runs differ in statements, files, arguments, their environment, their seed. Running run a's command again with some
of that as in run b tells whether it suffices. Delta debugging (the `ddmin` algorithm: Zeller and Hildebrandt,
"Simplifying and isolating failure-inducing input", 2002) shrinks the set until no single one can be taken out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from introspect_cli.compare.changes.statements import Change
from introspect_cli.compare.reasons.documents import ARGUMENT, OPTION, arguments
from introspect_cli.rerun.places.surroundings import OtherFile
from introspect_cli.store.files.folders import REDACTED
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Difference:
    """One setting that differs between the two runs.

    Attributes:
        axis: `argument`, `environment` or `capture` (an option of `introspect capture` that changes the run).
        name: option or variable.
        a: its value in run a; None where absent. A list for options of several values, True for a flag.
        b: its value in run b.
    """

    axis: str
    name: str
    a: Any
    b: Any


@dataclass(frozen=True)
class OtherPython:
    """Another interpreter, with other packages.

    Attributes:
        a: a's; "" for the one that runs this.
        b: b's.
        packages: how many packages differ in their version.
    """

    a: str
    b: str
    packages: int


Element: TypeAlias = "Change | OtherFile | Difference | OtherPython"


def place_of(element: Element) -> str:
    """Where an element is: `model.py:41`, `config.yaml`, `--lr`."""
    if isinstance(element, Change):
        return element.place
    return f"the interpreter {element.b}" if isinstance(element, OtherPython) else element.name


def counted(elements: Collection[Element]) -> str:
    """How many there are of what kind: `37 changes in 6 files and 2 differing settings`."""
    files = {element.file for element in elements if isinstance(element, Change)}
    files |= {element.name for element in elements if isinstance(element, OtherFile)}
    inside = sum(isinstance(element, Change | OtherFile) for element in elements)
    settings = count(len(elements) - inside, "differing setting")
    if not inside:
        return settings
    if inside == len(elements):
        return f"{count(inside, 'change')} in {count(len(files), 'file')}"
    return f"{count(inside, 'change')} in {count(len(files), 'file')} and {settings}"


def kind_of(element: Element) -> str:
    """What an element is, in one word."""
    if isinstance(element, Change):
        return element.unit
    return (
        "setting" if isinstance(element, Difference) else "python" if isinstance(element, OtherPython) else "other file"
    )


Item = TypeVar("Item")


def ddmin(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> Sequence[Item]:
    """A smallest set, in that no single item can be left out, on which `fails` is still true.

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


_IRRELEVANT = frozenset(
    {"_", "COLUMNS", "HOME", "LINES", "LOGNAME", "OLDPWD", "PWD", "SHLVL", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY"}
    | {"TERM", "TMPDIR", "TMUX", "TMUX_PANE", "USER", "WINDOWID", "XDG_SESSION_ID", "INVOCATION_ID"}
)
"""Variables that name where and by whom a shell was opened."""


def differences(a: dict[str, Any], b: dict[str, Any]) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """The settings that differ and can be changed, and the names of those that cannot since their value is secret."""
    changeable, secret = [], []
    axes = {
        "argument": (_arguments(a), _arguments(b)),
        "environment": (_part(a, "environment"), _part(b, "environment")),
        "capture": (_part(a, "seeds"), _part(b, "seeds")),
    }
    for axis, (one, two) in axes.items():
        for name in sorted({*one, *two}):
            left, right = one.get(name), two.get(name)
            if left == right or (axis == "environment" and name in _IRRELEVANT):
                continue
            if REDACTED in (left, right):
                secret.append(name)
            else:
                changeable.append(Difference(axis, name, left, right))
    return tuple(changeable), tuple(secret)


def _part(settings: dict[str, Any], name: str) -> dict[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, dict) else {}


def _arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """The script's own arguments, by name."""
    words = _part(settings, "command").get("arguments")
    return arguments(map(str, words)) if isinstance(words, list) else {}


@dataclass(frozen=True)
class Applied:
    """Settings of run a, some of them as in run b: capture options, the script's arguments by name, variables."""

    options: tuple[str, ...]
    arguments: dict[str, Any]
    environment: dict[str, str | None]


def applied(chosen: Iterable[Difference], given: Mapping[str, Any]) -> Applied:
    """What running a with these of b's settings takes."""
    words = dict(given)
    environment: dict[str, str | None] = {}
    options: list[str] = []
    for item in chosen:
        if item.axis == "argument":
            words[item.name] = item.b
        elif item.axis == "environment":
            environment[item.name] = item.b
        elif item.name == "seed" and item.b is not None:
            options += ["--seed", str(item.b)]
        elif item.name == "deterministic" and item.b:
            options.append("--deterministic")
    return Applied(tuple(options), words, environment)


def command_line(chosen: dict[str, Any]) -> list[str]:
    """Words that `arguments` reads as these: what stands by itself first, where no option takes it for its value."""
    line = [str(value) for name, value in chosen.items() if name.startswith(ARGUMENT) and value is not None]
    for name, value in chosen.items():
        if name.startswith(ARGUMENT) or value is None:
            continue
        if value is True:
            line.append(name)
        elif isinstance(value, list):
            line += [name, *map(str, value)]
        elif name.startswith("-") and value and not OPTION.match(value):
            line += [name, value]
        else:
            line.append(f"{name}={value}")
    return line

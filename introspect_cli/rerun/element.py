"""What differs between two runs and can be changed by itself, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from introspect_cli.compare.changes.statements import Change
from introspect_cli.records import count

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path


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
class OtherFile:
    """A file that is no source and holds something else in b's directory.

    Attributes:
        name: its path in the project.
        a: where a's lies; None where only b's directory has it.
        b: where b's lies; None where only a's directory has it.
    """

    name: str
    a: Path | None
    b: Path | None


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

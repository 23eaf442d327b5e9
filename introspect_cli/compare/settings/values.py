"""Which values of a configuration file changed, and the file with some of these changes and not the others.

A value is changed where it stands in the text, so comments, tags and the order of keys stay as somebody wrote them, and
no format has to be written anew. Both texts are laid beside each other line by line, and each pair of lines that
differs is named by the values that are others with it alone. Where that makes no text of the format, the lines around
are one change, and else the file is.
"""

from __future__ import annotations

import difflib
import json
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.changes.statements import Change, Edit, Side, changed_file, with_edits
from introspect_cli.compare.settings.files import parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_MOST_LINES = 5000
_MOST_CHANGES = 200


def changed_values(file: str, text_a: str, text_b: str) -> tuple[Change, ...]:
    """The values in which two versions of a configuration file differ; the file where it is not read value by value."""
    return tuple(change for change, _ in _edited(file, text_a, text_b))


def with_values(changes: Iterable[Change], text_a: str, text_b: str) -> str:
    """Make a's text with some of the changes that lead to b's."""
    chosen = set(changes)
    if not chosen:
        return text_a
    edits = [edit for change, edit in _edited(next(iter(chosen)).file, text_a, text_b) if change in chosen]
    if None in edits:
        return text_b
    one, two = (_lines(next(iter(chosen)).file, text) for text in (text_a, text_b))
    return with_edits(one, two, [edit for edit in edits if edit is not None])


def _edited(file: str, text_a: str, text_b: str) -> list[tuple[Change, Edit | None]]:
    """Each change, and how it is made in a's text; None where the whole file is b's."""
    ending = PurePath(file).suffix.lower()
    a, b = parsed(text_a, ending), parsed(text_b, ending)
    whole: list[tuple[Change, Edit | None]] = [(changed_file(file, text_a, text_b), None)]
    if a is None or b is None:
        return whole
    if a == b:
        return []
    one, two = _lines(file, text_a), _lines(file, text_b)
    if len(one) + len(two) > _MOST_LINES:
        return whole
    edited: list[tuple[Change, Edit | None]] = []
    opcodes = difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
    for hunk in [Edit(*places) for tag, *places in opcodes if tag != "equal"]:
        for edits in (_pairs(hunk), [hunk]):
            values = [parsed(with_edits(one, two, [edit]), ending) for edit in edits]
            if None not in values:
                break
        else:
            return whole
        for edit, value in zip(edits, values, strict=True):
            paths = list(_paths(a, value))
            if paths:
                sides = (_side(one, edit.low, edit.high), _side(two, edit.start, edit.stop))
                edited.append((Change(file, ", ".join(paths), *sides, "value"), edit))
    every = parsed(with_edits(one, two, [edit for _, edit in edited if edit is not None]), ending)
    return edited if every == b and len(edited) <= _MOST_CHANGES else whole


def _lines(file: str, text: str) -> list[str]:
    """A text in lines; of JSON one value a line, however it was written."""
    if PurePath(file).suffix.lower() == ".json":
        text = json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    return text.split("\n")


def _pairs(hunk: Edit) -> list[Edit]:
    """A hunk line by line, where both versions have as many."""
    if hunk.high - hunk.low != hunk.stop - hunk.start:
        return [hunk]
    return [
        Edit(hunk.low + place, hunk.low + place + 1, hunk.start + place, hunk.start + place + 1)
        for place in range(hunk.high - hunk.low)
    ]


def _side(lines: Sequence[str], first: int, last: int) -> Side | None:
    return Side(first + 1, last, "\n".join(line.strip() for line in lines[first:last])) if last > first else None


def _paths(a: Any, b: Any, above: str = "") -> Iterator[str]:
    """The keys under which two nested values differ: `model.dropout`, `layers[2]`."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in a or key not in b:
                yield f"{above}.{key}".lstrip(".")
            else:
                yield from _paths(a[key], b[key], f"{above}.{key}".lstrip("."))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, pair in enumerate(zip(a, b, strict=True)):
            yield from _paths(*pair, f"{above}[{place}]")
    elif a != b or type(a) is not type(b):
        yield above

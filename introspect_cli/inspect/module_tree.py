"""The module tree of one run, with what each module gave at the first step; nested values by path."""

from __future__ import annotations

import ast
import contextlib
import re
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from introspect_cli.inspect.overview import parameter_sizes, reader_of
from introspect_cli.records import Kind, ModuleInfo, Phase
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.records import Record

_PIECE = re.compile(r"""\.\w+|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\[\]]*)\]""")
_LONGEST = 20  # digits of a position; python reads no number of more than 4,300
_DEEPEST = 32
"""Keys after which the rest of a path is one key: nothing that people write is nested deeper."""


def keys(path: str) -> list[str | int]:
    """The keys of a path: `[0]['hidden'].logits` as 0, `hidden`, `logits`.

    From an unreadable piece on, and after `_DEEPEST` pieces, the rest is one key.
    """
    out: list[str | int] = []
    while path:
        match = _PIECE.match(path)
        if match is None or len(out) == _DEEPEST:
            return [*out, path]
        out.append(_key(match[0]))
        path = path[match.end() :]
    return out


def _key(piece: str) -> str | int:
    """The key in one piece of a path: an int, an unquoted text or an attribute's name.

    A number of `_LONGEST` digits or more stays a text.
    """
    inner = piece[1:] if piece[0] == "." else piece[1:-1]
    if piece[0] == "[" and inner.isascii() and inner.isdigit() and len(inner) < _LONGEST:
        return int(inner)
    if inner[:1] in ("'", '"'):
        with contextlib.suppress(ValueError, SyntaxError):  # an escape that python does not know
            return clean(str(ast.literal_eval(inner)))  # what was an escape is a character now
    return inner


def nested(items: Iterable[tuple[str, Any]]) -> Any:
    """(path, value) pairs as nested dicts and lists; a level whose keys are 0 to n - 1 is a list.

    A value beside others that lie inside it has the key ""; one pair without a path is its value.
    """
    return _nested([(keys(path), value) for path, value in items])


def _nested(pairs: list[tuple[list[str | int], Any]]) -> Any:
    """As `nested`, of (keys, value) pairs; a value beside others that lie inside it has the key ""."""
    if len(pairs) == 1 and not pairs[0][0]:
        return pairs[0][1]
    groups: dict[str | int, list[tuple[list[str | int], Any]]] = {}
    for path, value in pairs:
        groups.setdefault(path[0] if path else "", []).append((path[1:], value))
    inner = {key: _nested(group) for key, group in groups.items()}
    is_list = inner and {*inner} == {*range(len(inner))}
    return [inner[place] for place in range(len(inner))] if is_list else inner


def flattened(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """(path, leaf) of nested dicts, lists and tuples; empty ones have no leaf. Each key is added as `[key!r]`.

    `path` is put before each path.
    """
    if not isinstance(value, (dict, list, tuple)):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, item in items for leaf in flattened(item, f"{path}[{key!r}]")]


@dataclass(frozen=True)
class ModuleRow:
    """One module of the tree.

    Attributes:
        info: name, class, where it is defined.
        parameters: elements of its parameters, those inside it included.
        shape: shape of its first output at the first recorded step; None where none was recorded.
        dtype: dtype of that output.
        scale: standard deviation of that output; None where not recorded.
        calls: how often it ran in that step.
        folded: how many equal neighbours this row stands for beside itself.
    """

    info: ModuleInfo
    parameters: int
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    scale: float | None = None
    calls: int = 0
    folded: int = 0


def module_tree(run: Any, *, fold: bool = True, rank: int | None = None, depth: int | None = None) -> list[ModuleRow]:
    """The module tree at the first recorded step.

    Args:
        run: the run.
        fold: of three or more numbered neighbours in a row that look equal, show only the first and the last.
        rank: whose; None for the first.
        depth: how many levels below the root are shown; None for all.

    Raises:
        UsageError: the run has no such rank.
    """
    reader = reader_of(run, rank)
    sizes = parameter_sizes(reader)
    outputs: dict[str, list[Record]] = {}
    for record in reader.records(int(reader.entries["step"][0])) if len(reader) else ():
        if record.site.kind is Kind.OUTPUT and record.site.phase is not Phase.RECOMPUTE:
            outputs.setdefault(record.site.fqn, []).append(record)
    rows = []
    for info in reader.modules:
        given = outputs.get(info.fqn, [])
        parameters = sum(size for name, size in sizes.items() if name.startswith(f"{info.fqn}."))
        outs = [(of.layout.shape, of.layout.dtype, of.stats.get("std")) for of in (record.summary for record in given)]
        shape, dtype, scale = outs[0] if outs else (None, "", None)
        rows.append(ModuleRow(info, parameters, shape, dtype, scale, len({record.site.call for record in given})))
    return [row for row in (_folded(rows) if fold else rows) if depth is None or row.info.fqn.count(".") <= depth]


def _folded(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Rows without those between the first and last of three or more numbered siblings that look equal.

    Equal are class, parameters, output shape, and all that is inside. What is inside hidden rows is hidden too; the
    first row says how many siblings are.
    """
    children: dict[str, list[ModuleRow]] = {}
    for row in rows:
        if row.info.fqn:  # a module without a name would be its own child
            children.setdefault(row.info.fqn.rpartition(".")[0], []).append(row)

    def look(row: ModuleRow) -> tuple[Any, ...]:
        """What of a module and of all inside it must be equal for it to be folded; the name, if it is no number."""
        inner = tuple((child.info.fqn.rpartition(".")[2], look(child)) for child in children.get(row.info.fqn, []))
        name = row.info.fqn.rpartition(".")[2]
        return (row.info.module_class, row.parameters, row.shape, inner, "" if name.isdecimal() else name)

    hidden: set[str] = set()
    folded: dict[str, int] = {}
    for siblings in children.values():
        for _, alike in groupby(siblings, look):
            names = [row.info.fqn for row in alike]
            hidden.update(names[1:-1])
            folded[names[0]] = len(names[1:-1])
    out = []
    for row in rows:
        head = row.info.fqn
        while head and head not in hidden:
            head = head.rpartition(".")[0]
        if not head:
            out.append(replace(row, folded=folded.get(row.info.fqn, 0)))
    return out

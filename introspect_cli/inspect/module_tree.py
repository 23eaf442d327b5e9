"""The module tree of one run, with what each module gave at the first step, nested values as a tree below it."""

from __future__ import annotations

import ast
import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from introspect_cli.inspect.overview import parameter_sizes, reader_of
from introspect_cli.records import Kind, ModuleInfo, Phase
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from introspect_cli.records import Record

_PIECE = re.compile(r"""\.\w+|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\[\]]*)\]""")
_LONGEST = 20  # digits of a position; python reads no number of more than 4,300
_DEEPEST = 32
"""Keys after which the rest of a path is one key: nothing that people write is nested deeper."""

_SIDES = (Kind.INPUT.value, Kind.OUTPUT.value)


@dataclass(frozen=True)
class ValueRow:
    """One line of a nested value.

    Attributes:
        depth: levels below the module, from 1.
        name: `input` or `output`, or the last piece of the path.
        path: the whole path; "" for the value itself.
        value_class: class of what holds others; "" for a leaf, or where the run does not say.
        shape: shape of a tensor; None for what is none.
        dtype: its dtype.
        scale: its standard deviation; None where not recorded.
        folded: how many equal neighbours this row stands for beside itself.
    """

    depth: int
    name: str
    path: str
    value_class: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    scale: float | None = None
    folded: int = 0


def pieces(path: str) -> list[str]:
    """A path in pieces: `[0]['hidden'].logits` as `[0]`, `['hidden']`, `.logits`.

    From an unreadable piece on, and after `_DEEPEST` pieces, the rest is one piece.
    """
    out: list[str] = []
    place = 0
    while place < len(path):
        match = _PIECE.match(path, place)
        if match is None or len(out) == _DEEPEST:
            return [*out, path[place:]]
        out.append(match[0])
        place = match.end()
    return out


def keys(path: str) -> list[str | int]:
    """The keys of a path: `[0]['hidden'].logits` as 0, `hidden`, `logits`; an unreadable rest is one key."""
    return [_key(piece) for piece in pieces(path)]


def _key(piece: str) -> str | int:
    """The key in one piece of a path: an int, an unquoted text or an attribute's name; an unreadable piece as it is.

    A number of `_LONGEST` digits or more stays a text.
    """
    if _PIECE.fullmatch(piece) is None:
        return piece
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


def flattened(value: Any, path: str = "", is_leaf: Callable[[Any], bool] = lambda _: False) -> list[tuple[str, Any]]:
    """(path, leaf) of nested dicts, lists and tuples; empty ones have no leaf. Each key is added as `[key!r]`.

    Args:
        value: what is nested.
        path: put before each path.
        is_leaf: whether a value is a leaf although it is a dict, list or tuple.
    """
    if is_leaf(value) or not isinstance(value, (dict, list, tuple)):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, item in items for leaf in flattened(item, f"{path}[{key!r}]", is_leaf)]


_Tree: TypeAlias = "dict[str, Any]"
"""A place in a nested value: what is inside it by piece of the path; what lies there itself at ""."""


def _nested_values(sides: Iterable[Record], classes: Any) -> dict[str, tuple[ValueRow, ...]]:
    """By module, the rows of nested inputs and outputs of its first call, inputs first.

    An argument that is one tensor is left out, and so is an output that is; () for a module that has no others.

    Args:
        sides: the records of inputs and outputs.
        classes: names of classes by module, `input` or `output`, and path; None where none were recorded.
    """
    trees: dict[tuple[str, str], _Tree] = {}
    for record in sides:
        site, layout = record.site, record.summary.layout
        if site.call:
            continue
        node = trees.setdefault((site.fqn, site.kind.value), {})
        for piece in pieces(site.path):
            node = node.setdefault(piece, {})
        form = layout.shape if layout.device else None
        node[""] = ValueRow(0, "", site.path, shape=form, dtype=layout.dtype, scale=_scale(record))
    rows_of: dict[str, tuple[ValueRow, ...]] = {}
    for (fqn, kind), root in sorted(trees.items(), key=lambda item: item[0][1]):
        # None where it is no more than tensors one by one.
        shown = {piece: node for piece, node in _inside(root).items() if kind == Kind.OUTPUT or _inside(node)}
        rows = list(_rows(shown, kind, "", 1, _named(classes, fqn, kind))) if shown else []
        rows_of[fqn] = (*rows_of.get(fqn, ()), *rows)
    return rows_of


def _scale(record: Record) -> float | None:
    scale = record.summary.stats.get("std")
    return scale if scale is not None and np.isfinite(scale) else None


def _inside(node: _Tree) -> _Tree:
    """What is inside a place, without what lies there itself."""
    return {piece: inner for piece, inner in node.items() if piece}


def _named(document: Any, *keys: str) -> dict[str, str]:
    """The texts of a document below `keys`, by path; {} where there are none."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return {str(path): str(name) for path, name in document.items()} if isinstance(document, dict) else {}


def _rows(node: _Tree, name: str, path: str, depth: int, classes: dict[str, str]) -> Iterator[ValueRow]:
    """Rows of a nested value, the outermost first.

    Of three or more numbered neighbours of equal `_form_of` (shape, dtype, what is inside), only the first and the last
    are shown, and the first says how many are hidden.

    Args:
        node: the value.
        name: of its row.
        path: the whole path to it.
        depth: levels below the module.
        classes: names of classes by path.
    """
    inside = list(_inside(node).items())
    if not inside:
        yield replace(node[""], depth=depth, name=name)
        return
    arguments = name == Kind.INPUT.value and depth == 1
    yield ValueRow(depth, name, path, "" if arguments else classes.get(path) or _guess(inside[0][0]))
    for start, end in stretches(
        [_form_of(inner) for _, inner in inside], [piece[1:-1].isdecimal() for piece, _ in inside]
    ):
        folded = end - start - 1 if end - start >= 2 else 0
        for place in (start, end) if folded else range(start, end + 1):
            piece, inner = inside[place]
            first, *more = _rows(inner, piece, path + piece, depth + 1, classes)
            yield replace(first, folded=folded if place == start else 0)
            yield from more


def stretches(looks: Sequence[object], numbered: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """(first, last) positions of stretches of equal neighbours, which cover all entries.

    Args:
        looks: what is compared, of each.
        numbered: whether an entry is numbered; only such a one begins a stretch longer than one.
    """
    start = 0
    while start < len(looks):
        end = start
        while numbered[start] and end + 1 < len(looks) and looks[end + 1] == looks[start]:
            end += 1
        yield start, end
        start = end + 1


def _form_of(node: _Tree) -> object:
    """Key of a nested value: shape, dtype and what is inside; values with equal keys may be folded."""
    leaf = node.get("")
    return leaf and (leaf.shape, leaf.dtype), [(piece, _form_of(inner)) for piece, inner in _inside(node).items()]


def _guess(piece: str) -> str:
    """`(object)`, `(sequence)` or `(mapping)`, by the form of the first key."""
    return "(object)" if piece[0] == "." else "(sequence)" if piece[1:-1].isdecimal() else "(mapping)"


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
        values: what was nested among its inputs and outputs.
    """

    info: ModuleInfo
    parameters: int
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    scale: float | None = None
    calls: int = 0
    folded: int = 0
    values: tuple[ValueRow, ...] = ()


def module_tree(run: Any, *, fold: bool = True, rank: int | None = None, depth: int | None = None) -> list[ModuleRow]:
    """The module tree at the first recorded step.

    Args:
        run: the run.
        fold: of three or more numbered neighbours in a row that look equal, show only the first and the last.
        rank: whose; None for the first.
        depth: how many levels below the root are shown, of modules and of nested values; None for all.

    Raises:
        UsageError: the run has no such rank.
    """
    reader = reader_of(run, rank)
    sizes, sides = parameter_sizes(reader), list(_first_sides(reader))
    settings = dict(run.settings)
    values = _nested_values(sides, settings.get("nested"))
    outputs: dict[str, list[Record]] = {}
    for record in sides:
        if record.site.kind is Kind.OUTPUT:
            outputs.setdefault(record.site.fqn, []).append(record)
    rows = []
    for info in reader.modules:
        given = outputs.get(info.fqn, [])
        row = ModuleRow(
            info,
            parameters=sum(size for name, size in sizes.items() if name.startswith(f"{info.fqn}.")),
            calls=len({record.site.call for record in given}),
            values=values.get(info.fqn, ()),
        )
        for record in given[:1]:
            layout = record.summary.layout
            row = replace(row, shape=layout.shape, dtype=layout.dtype, scale=_scale(record))
        rows.append(row)
    rows = _folded(rows) if fold else rows
    return rows if depth is None else [_cut_values(row, depth) for row in rows if row.info.fqn.count(".") <= depth]


def _first_sides(reader: Any) -> Iterator[Record]:
    """Records of module inputs and outputs in the first recorded step, without recomputation; none without a step."""
    batch, kinds = reader.read_row(0) if len(reader) else None, reader.sites.kind
    for row, number in enumerate(batch.site.tolist() if batch is not None else ()):
        if kinds[number] in _SIDES:
            record = reader.record(batch, row, int(reader.entries["step"][0]))
            if record.site.phase is not Phase.RECOMPUTE:
                yield record


def _cut_values(row: ModuleRow, depth: int) -> ModuleRow:
    """The row without nested values that lie deeper than `depth` levels below the root."""
    left = depth - row.info.fqn.count(".")
    return replace(row, values=tuple(value for value in row.values if value.depth <= left))


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
        """What of a module and of all inside it must be equal for it to be folded."""
        inner = tuple(look(child) for child in children.get(row.info.fqn, []))
        return (row.info.module_class, row.parameters, row.shape, inner)

    hidden: set[str] = set()
    folded: dict[str, int] = {}
    for siblings in children.values():
        numbered = [row.info.fqn.rpartition(".")[2].isdecimal() for row in siblings]
        for start, end in stretches([look(row) for row in siblings], numbered):
            if end - start >= 2:
                hidden.update(row.info.fqn for row in siblings[start + 1 : end])
                folded[siblings[start].info.fqn] = end - start - 1
    out = []
    for row in rows:
        head = row.info.fqn
        while head and head not in hidden:
            head = head.rpartition(".")[0]
        if not head:
            out.append(replace(row, folded=folded.get(row.info.fqn, 0)))
    return out

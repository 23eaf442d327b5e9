"""The module tree of one run, with what each module gave at the first step, nested values as a tree below it."""

from __future__ import annotations

import ast
import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.inspect.overview import parameter_sizes, reader_of
from introspect_cli.records import Kind, ModuleInfo, Phase
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
    """`[0]['hidden'].logits` cut into its pieces; what cannot be read is one piece."""
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
    """The keys of a path, numbers as numbers; what cannot be read is one key."""
    return [_key(piece) for piece in pieces(path)]


def _key(piece: str) -> str | int:
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
    """Values by path as nested dicts and lists; a single value at the empty path is itself."""
    pairs = [(keys(path), value) for path, value in items]
    return _nested(pairs)


def _nested(pairs: list[tuple[list[str | int], Any]]) -> Any:
    if len(pairs) == 1 and not pairs[0][0]:
        return pairs[0][1]
    groups: dict[str | int, list[tuple[list[str | int], Any]]] = {}
    for path, value in pairs:
        groups.setdefault(path[0] if path else "", []).append((path[1:], value))
    inner = {key: _nested(group) for key, group in groups.items()}
    if inner and all(isinstance(key, int) for key in inner) and sorted(map(int, inner)) == list(range(len(inner))):
        return [inner[place] for place in range(len(inner))]
    return inner


def flattened(value: Any, path: str = "", is_leaf: Callable[[Any], bool] = lambda _: False) -> list[tuple[str, Any]]:
    """Leaves of nested dicts and lists with their paths."""
    if is_leaf(value) or not isinstance(value, (dict, list, tuple)):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, item in items for leaf in flattened(item, f"{path}[{key!r}]", is_leaf)]


class _Node:
    """A place in a nested value, while the tree is built."""

    def __init__(self) -> None:
        self.inside: dict[str, _Node] = {}
        self.leaf: ValueRow | None = None


def nested_values(reader: Any, settings: Any) -> dict[str, tuple[ValueRow, ...]]:
    """For each module, the nested ones among what it was given and gave in its first call of the first step."""
    if not len(reader):
        return {}
    batch, sites = reader.read_row(0), reader.sites
    trees: dict[tuple[str, str], _Node] = {}
    for row, number in enumerate(np.asarray(batch.site)):
        kind = sites.kind[number]
        if kind not in _SIDES or int(sites.call[number]) or sites.phase[number] == Phase.RECOMPUTE.value:
            continue
        layout = reader.layouts[int(batch.layout[row])]
        variance = batch.floats.get("var")
        measured = variance is not None and np.isfinite(variance[row])
        node = trees.setdefault((sites.fqn[number], kind), _Node())
        for piece in pieces(sites.path[number]):
            node = node.inside.setdefault(piece, _Node())
        node.leaf = ValueRow(
            0,
            "",
            sites.path[number],
            shape=tuple(layout.shape) if layout.device else None,
            dtype=layout.dtype,
            scale=float(np.sqrt(variance[row])) if measured else None,
        )
    classes = settings.get("nested") if isinstance(settings, dict) else None
    rows_of: dict[str, tuple[ValueRow, ...]] = {}
    for (fqn, kind), root in sorted(trees.items(), key=lambda item: item[0][1]):
        rows = _rows_of(root, kind, _classes(classes, fqn, kind))
        rows_of[fqn] = (*rows_of.get(fqn, ()), *rows)
    return rows_of


def _classes(document: Any, fqn: str, kind: str) -> dict[str, str]:
    """Path to class name, as far as a run says; a run of an older version does not."""
    for key in (fqn, kind):
        document = document.get(key) if isinstance(document, dict) else None
    return {str(path): str(name) for path, name in document.items()} if isinstance(document, dict) else {}


def _rows_of(root: _Node, kind: str, classes: dict[str, str]) -> list[ValueRow]:
    """The lines of one side of a module; none where it is no more than tensors one by one."""
    arguments = {piece: node for piece, node in root.inside.items() if kind == Kind.OUTPUT.value or node.inside}
    if not arguments:
        return []
    shown = _Node()
    shown.inside = arguments
    rows: list[ValueRow] = []
    _walk(shown, kind, "", 1, classes, rows)
    return rows


def _walk(node: _Node, name: str, path: str, depth: int, classes: dict[str, str], rows: list[ValueRow]) -> None:
    if not node.inside:
        if node.leaf is not None:
            rows.append(replace(node.leaf, depth=depth, name=name))
        return
    arguments = name == Kind.INPUT.value and depth == 1
    rows.append(ValueRow(depth, name, path, "" if arguments else classes.get(path) or _guess(node)))
    children = list(node.inside.items())
    numbered = [piece[1:-1].isdecimal() for piece, _ in children]
    looks = [_look(inner) if number else None for (_, inner), number in zip(children, numbered, strict=True)]
    for start, end in stretches(looks, numbered):
        first, folded = len(rows), end - start >= 2
        for piece, inner in (children[start], children[end]) if folded else children[start : end + 1]:
            _walk(inner, piece, path + piece, depth + 1, classes, rows)
        if folded:
            rows[first] = replace(rows[first], folded=end - start - 1)


def stretches(looks: Sequence[object], numbered: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and last position of each stretch of neighbours that look like its first, if that is numbered."""
    start = 0
    while start < len(looks):
        end = start
        while numbered[start] and end + 1 < len(looks) and looks[end + 1] == looks[start]:
            end += 1
        yield start, end
        start = end + 1


def _look(node: _Node) -> tuple[Any, ...]:
    leaf = node.leaf
    tensor = (leaf.shape, leaf.dtype) if leaf is not None else None
    return (tensor, tuple((piece, _look(inner)) for piece, inner in node.inside.items()))


def _guess(node: _Node) -> str:
    """What a run that tells no classes lets one say: the form of the keys."""
    first: Sequence[str] = next(iter(node.inside))
    if first[0] == ".":
        return "(object)"
    return "(sequence)" if "".join(first[1:-1]).isdecimal() else "(mapping)"


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
    """The module tree; of runs of equal numbered neighbours only the first and the last, unless told otherwise."""
    reader = reader_of(run, rank)
    sizes = parameter_sizes(reader)
    outputs = _outputs(reader)
    values = nested_values(reader, dict(run.settings))
    rows = []
    for info in reader.modules:
        prefix = info.fqn + "."
        inside = sum(size for name, size in sizes.items() if name.startswith(prefix))
        shape, dtype, scale, calls = outputs.get(info.fqn, (None, "", None, 0))
        rows.append(ModuleRow(info, inside, shape, dtype, scale, calls, values=values.get(info.fqn, ())))
    if fold:
        rows = _folded(rows)
    return rows if depth is None else [_cut(row, depth) for row in rows if row.info.fqn.count(".") <= depth]


def _cut(row: ModuleRow, depth: int) -> ModuleRow:
    """A row without the nested values that lie deeper than is wanted."""
    left = depth - row.info.fqn.count(".")
    return replace(row, values=tuple(value for value in row.values if value.depth <= left))


def _outputs(reader: Any) -> dict[str, tuple[tuple[int, ...] | None, str, float | None, int]]:
    """First output of each module at the first step: shape, dtype, scale, number of calls."""
    outputs: dict[str, tuple[tuple[int, ...] | None, str, float | None, int]] = {}
    if not len(reader):
        return outputs
    batch, sites = reader.read_row(0), reader.sites
    calls: dict[str, set[int]] = {}
    for row, number in enumerate(np.asarray(batch.site)):
        if sites.kind[number] != Kind.OUTPUT.value or sites.phase[number] == Phase.RECOMPUTE.value:
            continue
        name = sites.fqn[number]
        calls.setdefault(name, set()).add(int(sites.call[number]))
        if name not in outputs:
            layout = reader.layouts[int(batch.layout[row])]
            var = batch.floats.get("var")
            scale = float(np.sqrt(var[row])) if var is not None and np.isfinite(var[row]) else None
            outputs[name] = (tuple(layout.shape), layout.dtype, scale, 0)
    return {name: (*value[:3], len(calls[name])) for name, value in outputs.items()}


def _folded(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Rows without the inner ones of runs of numbered siblings that look alike."""
    children: dict[str, list[ModuleRow]] = {}
    for row in rows:
        if row.info.fqn:  # a module without a name would be its own child
            children.setdefault(row.info.fqn.rpartition(".")[0], []).append(row)

    def look(row: ModuleRow) -> tuple[Any, ...]:
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

"""Statements of two versions of a project that compute something else, each with its place.

Functions, class bodies and files are paired by file and name, by name alone where they moved to another file, and by
what they compute where they were renamed. A function of one version alone is inlined where it is called. Each
difference is given as the statement, and the line of it, that wrote it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from itertools import islice, zip_longest
from pathlib import PurePath
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from introspect_cli.compare.changes.statements import (
    DEFINITIONS,
    FUNCTIONS,
    Change,
    Side,
    changed_file,
    code_on_one_line,
    first_line,
    statements_of,
    tree_of,
)
from introspect_cli.compare.changes.values import (
    STATEMENTS,
    Difference,
    Names,
    Reader,
    Value,
    differences,
    head_of,
    parameters_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.changes.statements import Definition
    from introspect_cli.compare.changes.values import Interned

_ALIKE = 0.5
_IMPORT = re.compile(r"(import|from)\b")
_WORD = re.compile(r"\w+|\S")
_MOST_PASSES = 4
_MOST_REROUTED = 4
_NAMED = frozenset({"attribute", "name", "keyword", "defines"})
"""Kinds of values whose name is the only thing that a rename changes."""


_COMPUTED = frozenset({"call", "BinOp", "Subscript", "part"})
"""Kinds of values that a statement is written to compute."""


class WrittenStatement(NamedTuple):
    """A statement (of a compound one, its head), the number of the line in it that is meant, and characters before.

    `before` is how much of the statement `on_one_line` stands before the part that is meant, `column` how far it is
    indented.
    """

    file: str
    scope: str
    side: Side
    line: int
    before: int = 0
    column: int = 0

    @property
    def is_head(self) -> bool:
        """Whether a block follows."""
        return self.side.text.rstrip().endswith(":")


class Version:
    """The files of a version that differ from the other's.

    Attributes:
        texts: they, by name.
        nodes: functions, classes and files, by place.
        effects: what each of them does.
        calls: those that it makes.
        order: what it calls, stores, changes in place and reads of objects, as it follows each other.
        idle: as in `Reader`, of all that was read.
        at: the innermost statement of each line.
        inside: statements of each function, class or file, by their texts; the last of equal ones.
        often: how often each text stands there.
        names: what names mean.
        bound: names that its files bind.
        words: all identifiers.
        read_inside: names that functions read and do not bind.
    """

    def __init__(self, texts: Mapping[str, str], names: Names) -> None:
        """Read the names of all files at once; nothing that they do. `names` are what is known before."""
        trees = {file: ast.parse(text) for file, text in texts.items()}
        statements = [each for file, tree in trees.items() for each in statements_of(file, tree.body)]
        self.texts, self.names = texts, names._replace(refused=set())
        self.nodes: dict[Definition, Any] = {(file, ""): tree for file, tree in trees.items()}
        self.effects: dict[Definition, list[Value]] = {}
        self.calls: dict[Definition, list[Value]] = {}
        self.order: dict[Definition, list[Value]] = {}
        self.idle: set[tuple[int, int]] = set()
        self.lines = {file: text.replace("\r\n", "\n").split("\n") for file, text in texts.items()}
        self.at: dict[tuple[str, int], WrittenStatement] = {}
        self.inside: dict[Definition, dict[str, WrittenStatement]] = {}
        self.often: Counter[tuple[Definition, str]] = Counter()
        for each in statements:
            written = self.statement_at(each.file, *each.lines, each.scope)
            if not (isinstance(each.node, ast.Expr) and isinstance(each.node.value, ast.Constant)):  # no docstring
                self.inside.setdefault(each.place, {})[written.side.text] = written
                self.often[each.place, written.side.text] += 1
            self.at |= dict.fromkeys(((each.file, n) for n in range(written.line, written.side.last + 1)), written)
            outer = each.file, each.scope.rpartition(".")[0]
            if isinstance(each.node, DEFINITIONS) and outer in self.nodes and not each.around:
                self.nodes[each.place] = each.node
        every = [node for tree in trees.values() for node in ast.walk(tree)]
        binding = [n for n in every if isinstance(n, ast.arg) or isinstance(getattr(n, "ctx", None), ast.Store)]
        self.bound = _names_in(binding)
        self.words = _names_in(every)
        self.kinds = cache(self._kinds)
        self.read_inside: set[str] = set()
        for node in (node for (_, name), node in self.nodes.items() if name):
            own = [each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.arg))]
            loaded = [each for each in own if isinstance(getattr(each, "ctx", None), ast.Load)]
            self.read_inside |= _names_in(loaded) - _names_in({*own} - {*loaded})

    def read(self, interned: Interned) -> None:
        """Fill `effects`, `calls` and `order` anew for all functions, classes and files, by the current `names`.

        Args:
            interned: keys of values, the same mapping for both versions; it grows.
        """
        for file in self.texts:
            tree = self.nodes[file, ""]
            imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
            env: dict[str, Value] = {}
            Reader(interned, self.names, file).read_block(imports, env)
            for place, node in self.nodes.items():
                if place[0] == file:
                    reader = Reader(interned, self.names, file)
                    reader.read(node, env if place[1] else {}, self.names.numbers.get(place))
                    self.effects[place] = reader.all_effects()
                    self.calls[place] = reader.calls
                    self.order[place] = reader.order
                    self.idle |= reader.idle

    def statement_of(self, value: Value | None) -> WrittenStatement | None:
        """The innermost statement at the line that wrote a value; None for no value, or a line in no statement."""
        if value is None:
            return None
        number = getattr(value.node, "lineno", 0)
        found = self.at.get((value.file, number))
        if found is None:
            return None
        *above, last = self.lines[value.file][found.side.first - 1 : number]
        before = "\n".join([*above, last.encode()[: getattr(value.node, "col_offset", 0)].decode()])
        return found._replace(line=number, before=len(code_on_one_line(before)))

    def whole_definition(self, place: Definition) -> WrittenStatement:
        """The function or class at a place of `nodes` as one statement, with decorators and body."""
        node = self.nodes[place]
        whole = self.statement_at(place[0], first_line(node), node.end_lineno or node.lineno, place[1])
        return whole._replace(line=node.lineno)

    def statement_at(self, file: str, first: int, last: int, scope: str) -> WrittenStatement:
        """Lines `first` to `last` of a file as one statement, dedented; the first line is the one that is meant."""
        lines = self.lines[file][first - 1 : last]
        column = len(lines[0]) - len(lines[0].lstrip())
        return WrittenStatement(file, scope, Side(first, last, dedent("\n".join(lines))), first, column=column)

    def beside(self, *lines: WrittenStatement | None) -> Definition:
        """The file and scope of the first of `lines` whose scope this version has."""
        places = ((line.file, line.scope) for line in lines if line is not None)
        return next((place for place in places if place in self.inside), ("", ""))

    def replaced_by(
        self, line: WrittenStatement, other: Version, near: WrittenStatement | None
    ) -> WrittenStatement | None:
        """The statement of `other` that most likely took the place of `line`; None where none is alike over `_ALIKE`.

        Only statements of the same scope count whose text this version's scope has less often; those that assign to the
        same, if there are any. Where it is `near`, a statement of `other`, that line of it is meant.
        """
        text, here, at = line.side.text, self.beside(line), other.beside(near, line)
        there = other.inside.get(at, {})
        left = sorted(each for each in there if other.often[at, each] > self.often[here, each])
        same = [each for each in left if "=" in each and each.partition("=")[0] == text.partition("=")[0]]
        best = get_close_matches(text, same or left, 1, 0 if same else _ALIKE)
        return None if not best else near if near and near.side == there[best[0]].side else there[best[0]]

    def _kinds(self, place: Definition) -> Counter[object]:
        """How many values of each kind a function, class or file computes, as it was read last."""
        return Counter(map(head_of, _values_in(self.effects[place]).values()))

    def imports_of(self, file: str) -> dict[str, WrittenStatement]:
        """Those of `inside` at the top of a file that import; {} where there are none."""
        return {text: line for text, line in self.inside.get((file, ""), {}).items() if _IMPORT.match(text)}

    def is_inlined(self, line: WrittenStatement | None) -> bool:
        """Whether a statement is of a function that the other version lacks."""
        return line is not None and line.scope.rpartition(".")[2] in self.names.inlined

    def keys_inside(self, place: Definition) -> frozenset[int]:
        """Keys of all values in the effects of a function or class, and of what is nested in it."""
        file, name = place
        inner = [p for p in self.nodes if p[0] == file and p[1].startswith(f"{name}.")]
        return frozenset().union(*(effect.inside for p in (place, *inner) for effect in self.effects[p]))


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Identifiers of the nodes themselves."""
    return {str(word) for node in nodes for key in ("id", "attr", "arg", "name") if (word := getattr(node, key, None))}


def changed(
    texts_a: Mapping[str, str], texts_b: Mapping[str, str], files: Iterable[str] = ()
) -> tuple[list[Change], frozenset[tuple[str, str]]]:
    """Statements in which two versions compute something else, sorted by file and line; and classes renamed, as (a, b).

    Up to `_MOST_PASSES` times, what was renamed or moved into a function of its own is learned from the differences and
    both versions are read again.

    Args:
        texts_a: the files that differ, by the names that they have in b.
        texts_b: those of b.
        files: names of all files of both versions.

    Raises:
        SyntaxError: a file cannot be parsed.
    """
    names, interned = _own_modules({*texts_a, *texts_b}, {*files}), dict[object, int]()
    a, b = Version(texts_a, names), Version(texts_b, names)
    for number in range(_MOST_PASSES):
        a.read(interned)
        b.read(interned)
        pairs = _paired_definitions(a, b)
        found = list(_differences(a, b, pairs))
        if number == _MOST_PASSES - 1 or not _learn_names(a, b, pairs, found):
            break
    changes: dict[object, Change] = {}
    for difference in _rejoined(a, b, found):
        for pair in _statements_of(a, b, difference):
            for one, two in _reordered(a, b, *pair):
                _add_change(changes, one, two)
    listed = {side for change in changes.values() for side in (change.a, change.b)}
    in_b = {place: other for other, place in pairs.items()}
    for difference in found:
        for line in _of_more_values(difference.a, a, b, in_b, listed):
            _add_change(changes, line, a.replaced_by(line, b, None))
        for line in _of_more_values(difference.b, b, a, pairs, listed):
            _add_change(changes, b.replaced_by(line, a, None), line)
    for version, matched in ((a, {*pairs.values()}), (b, {*pairs})):
        left = version.nodes.keys() - matched
        for file, name in sorted(left):
            outer, _, last = name.rpartition(".")
            hidden = version.names.inlined.keys() - version.names.refused
            if name and last not in hidden and (file, outer) not in left:
                line = version.whole_definition((file, name))
                _add_change(changes, *((line, None) if version is a else (None, line)))
    if not changes:  # values have no order: which of two draws comes first, or whether a read sees what a line writes
        for pair in _moved(a, b, pairs):
            for one, two in _reordered(a, b, *pair):
                _add_change(changes, one, two)
    classes = (each for each in pairs.items() if isinstance(b.nodes[each[0]], ast.ClassDef))
    renamed = frozenset((_last(other), _last(place)) for place, other in classes if _last(other) != _last(place))
    return sorted(_paired_once(changes.values(), a, b), key=lambda change: (change.file, change.line)), renamed


def _values_in(values: Iterable[Value]) -> dict[int, Value]:
    """Values with all that they are made of, by key."""
    pending, found = [*values], dict[int, Value]()
    while pending:
        value = pending.pop()
        if value.key not in found:
            found[value.key] = value
            pending += [part for part in value.parts if isinstance(part, Value)]
    return found


def _of_more_values(
    value: Value | None, own: Version, other: Version, places: Mapping[Definition, Definition], listed: set[Side | None]
) -> Iterator[WrittenStatement]:
    """New statements, not `listed`, that compute a part of a value, of a kind that their function computes more often.

    That is than its paired one of the other version, by `places`.
    """
    for part in _values_in([value]).values() if value else ():
        line = own.statement_of(part) if part.kind in _COMPUTED else None
        here = (line.file, line.scope) if line else ("", "")
        if line and line.side not in listed and here in places:
            there, text = places[here], line.side.text
            more = own.often[here, text] > other.often[there, text]
            if more and own.kinds(here)[head_of(part)] > other.kinds(there)[head_of(part)]:
                yield line


def _paired_once(changes: Iterable[Change], a: Version, b: Version) -> Iterator[Change]:
    """The changes; of those that have a statement in common, only the most alike of the pairs keeps it.

    What is left of another pair is dropped where both versions have it in one function, and as often.
    """

    def likeness(change: Change) -> float:
        one, two = change.a, change.b
        return SequenceMatcher(None, one.text, two.text, autojunk=False).ratio() if one and two else -1

    taken: set[tuple[str, str, Side | None]] = set()
    for change in sorted(changes, key=likeness, reverse=True):
        file_a = change.file_a or change.file
        places = ("a", file_a, change.a), ("b", change.file, change.b)
        one, two = (None if place in taken else place[2] for place in places)
        taken |= {*places}
        if (one, two) == (change.a, change.b):
            yield change
        elif side := one or two:
            often = [v.often[(file, change.scope), side.text] for v, (_, file, _) in zip((a, b), places, strict=True)]
            if (often[0] > often[1]) if one else (often[1] > often[0]):
                file, before = (file_a, (change.before[0], 0)) if one else (change.file, (0, change.before[1]))
                line = one.first if one else change.line
                yield change._replace(file=file, file_a="", a=one, b=two, unit="statement", line=line, before=before)


def changed_between(
    texts_a: Mapping[str, str], texts_b: Mapping[str, str], files: Iterable[str] = ()
) -> tuple[list[Change], frozenset[tuple[str, str]], list[str]]:
    """(changes, and classes renamed, as of `changed`; files of both versions that have none).

    A file that Python cannot parse is one change of unit `file`. Arguments are those of `changed`.
    """
    every = dict.fromkeys([*texts_a, *texts_b])
    whole = [file for file in every if None in (tree_of(each.get(file, "")) for each in (texts_a, texts_b))]
    parsed_a, parsed_b = ({f: t for f, t in texts.items() if f not in whole} for texts in (texts_a, texts_b))
    changes = [changed_file(file, texts_a.get(file), texts_b.get(file)) for file in whole]
    found, renamed = changed(parsed_a, parsed_b, files)
    changes += found
    differ = {file for each in changes for file in (each.file, each.file_a)}
    return changes, renamed, sorted((parsed_a.keys() & parsed_b.keys()) - differ)


def _moved(
    a: Version, b: Version, pairs: Mapping[Definition, Definition]
) -> Iterator[tuple[WrittenStatement, WrittenStatement]]:
    """Statements that call, store or change in place in another order, as they are in a and in b.

    And those that read an attribute before, not after, a statement of the same function stores it, or the reverse.
    """
    for place, other in pairs.items():
        left, right = ([v for v in order if v.kind != "attribute"] for order in (a.order[other], b.order[place]))
        keys = [[value.key for value in own] for own in (left, right)]
        for low, start, size in reversed(SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()):
            del left[low : low + size], right[start : start + size]
        reads_a, reads_b = _reads_by_stores(a.order[other]), _reads_by_stores(b.order[place])
        left += [reads_a[key] for key in reads_a.keys() - reads_b.keys()]
        right += [reads_b[key] for key in reads_b.keys() - reads_a.keys()]
        in_a = {value.key: a.statement_of(value) for value in left}
        for value in right:
            one, two = in_a.get(value.key), b.statement_of(value)
            if one is not None and two is not None:
                yield one, two


def _reordered(
    a: Version, b: Version, one: WrittenStatement | None, two: WrittenStatement | None
) -> Iterator[tuple[WrittenStatement | None, WrittenStatement | None]]:
    """The pair itself; of the head of a block that moved, what stands elsewhere in its function, if anything."""
    moved: list[tuple[WrittenStatement | None, WrittenStatement | None]] = []
    if one is not None and two is not None and one.side.text == two.side.text and one.is_head:
        in_a, in_b = a.inside[one.file, one.scope], b.inside[two.file, two.scope]
        places_a, places_b = ([(text, each.column) for text, each in held.items()] for held in (in_a, in_b))
        blocks = SequenceMatcher(None, places_a, places_b, autojunk=False).get_matching_blocks()
        same = {place for _, start, size in blocks for place in places_b[start : start + size]}
        here, there = (one.file, one.scope), (two.file, two.scope)
        once = {text for text in in_a.keys() & in_b.keys() if a.often[here, text] == b.often[there, text] == 1}
        moved = [(in_a[text], line) for text, line in in_b.items() if text in once and (text, line.column) not in same]
    yield from moved or [(one, two)]


def _reads_by_stores(order: Iterable[Value]) -> dict[tuple[int, int], Value]:
    """Attributes that are read, by their key and how often they were stored before."""
    stored, reads = Counter[int](), dict[tuple[int, int], Value]()
    for value in order:
        if value.kind == "attribute":
            reads[value.key, stored[value.key]] = value
        elif value.kind == "store":
            stored[value.parts[0].key] += 1
    return reads


def _statements_of(
    a: Version, b: Version, found: Difference
) -> Iterator[tuple[WrittenStatement | None, WrittenStatement | None]]:
    """Pairs of statements of a difference; None where one has none.

    A statement that both versions have, in one function and as often, is no change by itself: two of them moved, and
    where they are one, its value takes another way. Then it is the statements of the function that one version alone
    has, if they are at most `_MOST_REROUTED`, else that statement; of more, none where the value has two, one in each
    version. Where one version alone has a statement, the other's is the one that it most likely replaced.
    """
    one, two = a.statement_of(found.a), b.statement_of(found.b)
    around = found.around or (None, None)
    near_a, near_b = a.statement_of(around[0]), b.statement_of(around[1])
    new_a, new_b = a.is_inlined(one) and not a.is_inlined(near_a), b.is_inlined(two) and not b.is_inlined(near_b)
    if one and two and new_a != new_b:  # a call of a new function took its place
        one, two = (near_a, two) if new_a else (one, near_b)
    here, there = a.beside(one, near_a, two), b.beside(two, near_b, one)
    in_a, in_b = a.inside.get(here, {}), b.inside.get(there, {})
    stand = [
        line is None or 0 < own.often[place, line.side.text] <= other.often[elsewhere, line.side.text]
        for line, own, place, other, elsewhere in ((one, a, here, b, there), (two, b, there, a, here))
    ]
    alone = None in found[:2] and any(part.kind in STATEMENTS for part in found[:2] if part)
    if found.moved and one and two and one.side.text != two.side.text:  # a value, from one statement to another
        yield one, a.replaced_by(one, b, None)
        yield b.replaced_by(two, a, None), two
    elif found.moved or (alone and not all(stand)):
        yield one, two
    elif not all(stand):
        one, two = (None if stays else each for each, stays in zip((one, two), stand, strict=True))
        yield one or (two and b.replaced_by(two, a, near_a)), two or (one and a.replaced_by(one, b, near_b))
    else:
        if one and two and one.side.text == two.side.text and in_a.keys() == in_b.keys():  # of other imports
            in_a, in_b = a.imports_of(one.file), b.imports_of(two.file)
        gone = [line for text, line in in_a.items() if text not in in_b]
        come = [line for text, line in in_b.items() if text not in in_a]
        gone, come = _without_renamed(gone, come, *(_WORD.findall(" ".join(lines)) for lines in (in_a, in_b)))
        only = [{line.side.text for line in lines} for lines in (gone, come)]
        wrote = ((x, y) for x, y in _wrote(a, b, found) if x.side.text in only[0] and y.side.text in only[1])
        gone, come = map(list, zip(*first, strict=True)) if (first := [*islice(wrote, 1)]) else (gone, come)
        rerouted = 0 < len(gone) + len(come) <= _MOST_REROUTED
        one, two = one or (two and in_a.get(two.side.text)), two or (one and in_b.get(one.side.text))
        if rerouted or not ((gone or come) and one and two and one.side.text != two.side.text):  # else neither changed
            yield from zip_longest(gone, come) if rerouted else [(one, two)]


def _without_renamed(
    gone: list[WrittenStatement], come: list[WrittenStatement], words_a: list[str], words_b: list[str]
) -> tuple[list[WrittenStatement], list[WrittenStatement]]:
    """The statements but those that differ in names alone that the other version's function does not have, if any."""
    common = {*words_a} & {*words_b}
    read = [{tuple(w if w in common else "" for w in _WORD.findall(x.side.text)): x for x in xs} for xs in (gone, come)]
    left = [[line for shape, line in one.items() if shape not in other] for one, other in (read, read[::-1])]
    return (left[0], left[1]) if left[0] or left[1] else (gone, come)


def _wrote(a: Version, b: Version, found: Difference) -> Iterator[tuple[WrittenStatement, WrittenStatement]]:
    """Pairs of statements that wrote what differs in two values, and in what these are made of, the nearest first."""
    pending, seen = [(found.a, found.b)], set[tuple[int, int]]()
    for one, two in pending:
        if one and two and one.key != two.key and (one.key, two.key) not in seen:
            seen.add((one.key, two.key))
            lines = a.statement_of(one), b.statement_of(two)
            if lines[0] and lines[1]:
                yield lines[0], lines[1]
            pending += zip(*([v for v in each.parts if isinstance(v, Value)] for each in (one, two)), strict=False)


def _add_change(changes: dict[object, Change], a: WrittenStatement | None, b: WrittenStatement | None) -> None:
    """Add a change of the statements `a` and `b` to `changes`; it moved where they are equal.

    Of two of the same file and sides, the one that is meant further ahead. Nothing if both are None.
    """
    side = b or a
    if side is not None:
        file_a = a.file if a is not None and b is not None and a.file != b.file else ""
        moved = a is not None and b is not None and a.side.text == b.side.text
        unit: Literal["moved", "statement"] = "moved" if moved else "statement"
        before = a.before if a else 0, b.before if b else 0
        change = Change(side.file, side.scope, a and a.side, b and b.side, unit, side.line, file_a, before)
        key = change.file, file_a, change.a, change.b
        changes[key] = min(changes.get(key, change), change, key=lambda each: (each.line, each.before))


def _own_modules(changed_files: AbstractSet[str], files: AbstractSet[str]) -> Names:
    """`Names` with the modules that the files of both versions are imported as, and those that are `kept`."""
    every = changed_files | files
    packages = {_module(file) for file in every} & {str(folder) for file in every for folder in PurePath(file).parents}
    same = [file for file in sorted(every - changed_files) if _module(file) not in packages]
    kept = {name: file for file in same for name in _imported_as(file, packages)}
    return Names(frozenset(name for file in every for name in _imported_as(file, packages)), kept=kept)


def _module(file: str) -> str:
    """A file's name without its end; of a package's first file, that of the package."""
    return file.removesuffix(".py").removesuffix("/__init__")


def _imported_as(file: str, packages: AbstractSet[str]) -> Iterator[str]:
    """Names that a file may be imported by: `a.b.c`, `b.c` and `c` for `a/b/c.py`; none from within a package."""
    parts = _module(file).split("/")
    starts = (start for start in range(len(parts)) if "/".join(parts[:start]) not in packages)
    yield from (".".join(parts[start:]) for start in starts)


def _paired_definitions(a: Version, b: Version) -> dict[Definition, Definition]:
    """Functions, classes and files of b, each with the one of a that it is: b's place to a's.

    First equal places; then the most alike, classes before functions, in paired classes: by the share of their values,
    over `_ALIKE`, which an equal last name raises by 1.
    """
    pairs = {place: place for place in b.nodes if place in a.nodes}
    own_a, own_b = ({p: v.keys_inside(p) for p in v.nodes if p[1] and p not in pairs} for v in (a, b))
    likely = [
        (is_class, len(own & keys) / max(len(own | keys), 1) + (_last(other) == _last(place)), place, other)
        for place, own in own_b.items()
        for other, keys in own_a.items()
        if (is_class := isinstance(b.nodes[place], ast.ClassDef)) == isinstance(a.nodes[other], ast.ClassDef)
    ]
    for _, like, place, other in sorted(likely, reverse=True):
        outer = place[1].rpartition(".")[0]
        owner = pairs.get((place[0], outer), ("", outer))[1]  # of its class if that is paired, else its name in b
        is_left = place not in pairs and other not in pairs.values() and owner == other[1].rpartition(".")[0]
        if like > _ALIKE and is_left:
            pairs[place] = other
    return pairs


def _last(place: Definition) -> str:
    """The last part of a function's or class's name."""
    return place[1].rpartition(".")[2]


def _differences(a: Version, b: Version, pairs: Mapping[Definition, Definition]) -> Iterator[Difference]:
    """Differences of all paired functions, classes and files, then effects of files that one version alone has.

    No difference are a name of a file that moved to another file with an equal value, one that one version alone binds
    (what reads it differs, unless functions of both versions read it), one that a loop or `__main__` binds and no
    function reads, and the default of a parameter that came last.
    Where effects do not differ, calls that are made another number of times are differences.

    Args:
        a: one version.
        b: the other.
        pairs: b's places to a's.
    """
    tops = [[e for place, effects in version.effects.items() if not place[1] for e in effects] for version in (a, b)]
    names = [{e.parts[0] for e in top if e.kind == "defines"} for top in tops]
    common = {e.key for e in tops[0]} & {e.key for e in tops[1]}
    new = (names[0] ^ names[1]) - (a.read_inside & b.read_inside)

    def effects_of(version: Version, place: Definition) -> list[Value]:
        """Effects of a function or class; of a file, without names that moved, are new, or that nobody else reads."""
        every, read = version.effects[place], a.read_inside | b.read_inside
        if place[1]:
            return every
        named = [e for e in every if e.kind == "defines"]
        quiet = {e.parts[0] for e in named if e.parts[0] not in read and _is_of_the_run(e.parts[1])} | new
        return [e for e in every if e.kind != "defines" or (e.key not in common and e.parts[0] not in quiet)]

    for place, other in sorted(pairs.items()):
        calls = a.calls[other], b.calls[place]
        every = differences(effects_of(a, other), effects_of(b, place))
        found = [one for one in every if not _changes_nothing(one, (a, other), (b, place))]
        yield from found
        if not found:  # the same values, of other calls: they may draw, or count
            by_key = [{call.key: call for call in made} for made in calls]
            counts = [Counter(call.key for call in made) for made in calls]
            yield from (Difference(by_key[0][key], None) for key in counts[0] - counts[1])
            yield from (Difference(None, by_key[1][key]) for key in counts[1] - counts[0])
    for version, matched in ((a, {*pairs.values()}), (b, {*pairs})):  # files that only one version has
        alone = [place for place in version.nodes.keys() - matched if not place[1]]
        for effect in (each for place in alone for each in effects_of(version, place) if each.key not in common):
            yield Difference(effect, None) if version is a else Difference(None, effect)


def _rejoined(a: Version, b: Version, found: Sequence[Difference]) -> Iterator[Difference]:
    """The differences; parts, of a value that one version alone has, and the other alone in a statement of that text.

    So are the lines of a block told that went to another function and were changed.
    """
    gone = {line.side.text: each for each in found if each.b is None and (line := a.statement_of(each.a))}
    joined = dict[int, list[Difference]]()
    for each in found:
        line = b.statement_of(each.b) if each.a is None else None
        other = gone.get(line.side.text) if line is not None else None
        if other and other.a and each.b and other.a.kind == each.b.kind and each.b.kind not in STATEMENTS:
            inner = differences([other.a], [each.b])
            joined |= {id(other): [], id(each): inner} if inner else {}
    for each in found:
        yield from joined.get(id(each), [each])


def _is_of_the_run(value: Value) -> bool:
    """Whether a file's name has a value from a loop or from the block of `__main__`, so that nobody imports it."""
    main = value.kind == "either" and any(getattr(part, "parts", ()) == ("__name__",) for part in value.parts[0].parts)
    return main or value.kind == "after"


def _changes_nothing(one: Difference, *held: tuple[Version, Definition]) -> bool:
    """Whether what one version alone has computes nothing else.

    That is a call that nobody uses the result of, or what a name becomes in a loop that does not read it, with calls
    made equally often, and the default of a parameter behind all that the other version has: calls mean what they
    meant.

    Args:
        one: the difference.
        held: the function of a and that of b, each in its version.
    """
    part = one.a or one.b
    if part is None or None not in (one.a, one.b):
        return False
    own = int(one.a is None)
    is_idle = one.around is not None and (one.around[own].key, part.key) in held[own][0].idle
    if part.kind == "unused" or (is_idle and not part.kind.startswith("in-place")):
        made = [Counter(call.key for call in version.calls[place]) for version, place in held]
        used = [part.parts[0]] if part.kind == "unused" else _values_in([part]).values()
        return all(made[0][each.key] == made[1][each.key] for each in used)
    mine, other = (v.nodes[place] for v, place in (held if one.b is None else held[::-1]))
    if part.kind != "default" or not (isinstance(mine, FUNCTIONS) and isinstance(other, FUNCTIONS)):
        return False  # of a function inside a class or file, or a function and a class of one name
    behind = parameters_of(mine)[len(parameters_of(other)) :]
    return part.node in {*mine.args.kw_defaults, *(default for _, default in behind)}


def _learn_names(a: Version, b: Version, pairs: Mapping[Definition, Definition], found: Iterable[Difference]) -> bool:
    """Set both versions' `names` by what was found so far, and return whether they changed.

    Learned are renamings, of paired definitions and of names that differ one to one, functions to inline (those of one
    version alone), which parameter of b is which of a, and files that give a name which a package may hand on: what
    they give does not have their name any more.

    Args:
        a: one version.
        b: the other; its names are translated to a's.
        pairs: b's places to a's.
        found: the differences so far.
    """
    simple = [{_last(place) for place in version.nodes} for version in (a, b)]
    free = a.bound - b.words - simple[0], b.bound - a.words - simple[1]
    named = {(_last(place), _last(other)) for place, other in pairs.items()}
    renamed = {new: old for new, old in named if new != old and new not in simple[0] and old not in simple[1]}
    votes: set[tuple[str, str]] = set()
    handed_on: set[object] = set()
    for one, two, _ in found:
        if one is not None and two is not None and one.kind == two.kind and one.kind in _NAMED:
            old, new = (next(part for part in value.parts if isinstance(part, str)) for value in (one, two))
            votes |= {(new, old)} if old in free[0] and new in free[1] else set()
            if one.kind == "name" and new == old and len(one.parts) != len(two.parts):
                handed_on |= {*one.parts[1:], *two.parts[1:]}
    news, olds = Counter(new for new, _ in votes), Counter(old for _, old in votes)
    renamed = {**b.names.renamed, **renamed, **{new: old for new, old in votes if news[new] == olds[old] == 1}}
    before = a.names, b.names
    kept = {module: file for module, file in a.names.kept.items() if file not in handed_on}
    a.names = a.names._replace(inlined=_unpaired_functions(a, {*pairs.values()}), kept=kept)
    held = {place: _numbers_in_a(a.nodes[other], b.nodes[place]) for place, other in pairs.items()}
    numbers = {place: of for place, of in held.items() if of}
    inlined = _unpaired_functions(b, {*pairs})
    b.names = b.names._replace(renamed=renamed, inlined=inlined, numbers=numbers, kept=kept)
    return before != (a.names, b.names)


def _numbers_in_a(one: ast.AST, two: ast.AST) -> dict[str, int]:
    """Numbers that the parameters of b's function `two` have in a's `one`, by name; {} where they have the same there.

    A parameter keeps its number where another came or went before it. One of b alone has a number that none of a has.
    """
    if not (isinstance(one, FUNCTIONS) and isinstance(two, FUNCTIONS)):
        return {}
    old, new = ([argument.arg for argument, _ in parameters_of(node)] for node in (one, two))
    numbers = {name: len(old) + place for place, name in enumerate(new)}
    for _, low, high, start, stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        numbers |= zip(new[start:stop], range(low, high), strict=False)  # the same, or renamed
    return {} if len(old) == len(new) and [*numbers.values()] == [*range(len(old))] else numbers


def _unpaired_functions(
    version: Version, matched: set[Definition]
) -> dict[str, tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of one version alone by their last name: (file, node), to be inlined.

    Left out are names that several definitions of the version have, of which a call may mean another, `forward`,
    `step`, dunders, and functions with decorators.
    """
    times = Counter(name.rpartition(".")[2] for _, name in version.nodes)
    found = {}
    for file, name in version.nodes.keys() - matched:
        node = version.nodes[file, name]
        plain = isinstance(node, FUNCTIONS) and not (node.decorator_list or node.args.vararg or node.args.kwarg)
        if plain and not node.name.startswith("__"):
            found[node.name] = file, node
    return {name: each for name, each in found.items() if times[name] == 1 and name not in {"forward", "step"}}

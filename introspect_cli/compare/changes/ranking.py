"""Changed statements, the one first that most likely made the runs diverge.

The records say where the runs diverge and what was equal before. So the code that computes that place is known by name:
the forward of a module and what it calls, the loss before `backward`, what stands between `backward` and the
optimizer's step, the data set, the seeds. A change in there comes first; then one in what builds it or gives it its
values; then one in what ran between the last thing that agreed and the first that did not. Any other change cannot
matter to that place as far as names tell, and is never called likely.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.clues import ORDER, Clues, Nearness, Ranked
from introspect_cli.compare.changes.nearness import Version
from introspect_cli.compare.changes.program import Program

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from introspect_cli.compare.changes.statements import Change


_IN_EXPRESSION = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP}


def ranked(
    changes: Sequence[Change], texts: tuple[Mapping[str, str], Mapping[str, str]], clues: Clues | None
) -> tuple[Ranked, ...]:
    """Changes, the most likely cause first."""
    if clues is None or not changes:
        return tuple(Ranked(change, Nearness.ELSEWHERE) for change in changes)
    of_sides = zip(texts, clues.lines, clues.spans, strict=True)
    sides = [Version(Program(files), clues, lines, spans) for files, lines, spans in of_sides]
    placed = [_nearest(change, sides, clues) for change in changes]
    return tuple(sorted(placed, key=lambda one: (ORDER.index(one.nearness), -one.hits, one.depth)))


def _nearest(change: Change, sides: Sequence[Version], clues: Clues) -> Ranked:
    words = _changed_words(change)
    every = {word for side in (change.a, change.b) if side is not None for word in _words(side.text)}
    hits = 2 * len(words & clues.words) + len(every & clues.words)
    passive = _takes_other_parameters(change) or _is_overridden(change, sides)
    best = (ORDER.index(Nearness.ELSEWHERE), 0)
    for side, version in zip((change.a, change.b), sides, strict=True):
        if side is None:
            continue
        last = sys.maxsize if change.unit == "file" else side.last
        best = min([best, *map(version.nearness, version.program.at(change.file, side.first, last))])
    return (
        Ranked(change, ORDER[best[0]], best[1] + _FAR, 0) if passive else Ranked(change, ORDER[best[0]], best[1], hits)
    )


_FAR = 5


def _takes_other_parameters(change: Change) -> bool:
    """Whether the head of a function gained or lost parameters and no default changed: its body must use them."""
    sides = [_defaults(side.text) for side in (change.a, change.b) if side is not None]
    if len(sides) < 2 or None in sides:
        return False
    one, two = (side or {} for side in sides)
    return all(one[name] == two[name] for name in one.keys() & two.keys())


def _is_overridden(change: Change, sides: Sequence[Version]) -> bool:
    """Whether defaults alone changed, of parameters or of fields, which every call gives another value."""
    texts = [side.text for side in (change.a, change.b) if side is not None]
    one, two = (_defaults(text) or _field(text) for text in (texts[0], texts[-1]))
    names = [name for name in one.keys() & two.keys() if one[name] != two[name]]
    if len(texts) < 2 or one.keys() != two.keys() or not names:
        return False
    return all(side.program.gives(name, change.scope) for side in sides for name in names)


def _field(text: str) -> dict[str, str]:
    """A field of a class with its default: `width: int = 4`; nothing for another statement."""
    try:
        node = ast.parse(text.strip()).body[0]
    except (SyntaxError, ValueError, IndexError):
        return {}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return {node.target.id: ast.dump(node.value)}
    return {}


def _defaults(head: str) -> dict[str, str] | None:
    """Parameters of a function by its head, each with its default; None where it is none."""
    try:
        node = ast.parse(f"{head.strip()}\n    pass").body[0]
    except (SyntaxError, ValueError, IndexError):
        return None
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    placed = [*node.args.posonlyargs, *node.args.args]
    given: list[ast.expr | None] = [None] * (len(placed) - len(node.args.defaults))
    pairs = [*zip(placed, [*given, *node.args.defaults], strict=True)]
    pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return {argument.arg: "" if default is None else ast.dump(default) for argument, default in pairs}


def _changed_words(change: Change) -> set[str]:
    """Names, numbers and texts that one side of a change has and the other has not."""
    counts = [Counter(_words(side.text)) if side is not None else Counter() for side in (change.a, change.b)]
    return set((counts[0] - counts[1]) + (counts[1] - counts[0])) or set(counts[0] + counts[1])


def _words(text: str) -> Iterable[str]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _IN_EXPRESSION:
                yield from re.findall(r"[\w.]+", token.string) if token.type == tokenize.STRING else [token.string]
    except (tokenize.TokenError, IndentationError, SyntaxError):
        yield from re.findall(r"\w+", text)

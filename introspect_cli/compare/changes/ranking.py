"""Changed statements, the one first that most likely made the runs diverge.

The records say where the runs diverge and what was equal before. So the code that computes that place is known by name
(`computes`): the forward of a module and what it calls, the loss before `backward`, what stands between `backward` and
the optimizer's step, the data set, the seeds. A change in there comes first; then one in what builds it or gives it its
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
from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.clues import ORDER, Clues, Nearness, Ranked
from introspect_cli.compare.changes.computes import (
    COMPUTES,
    LOADS,
    LOSS,
    MODES,
    CodePlace,
    gradient,
    loss,
    merged,
    optimizer,
    words,
)
from introspect_cli.compare.changes.program import Program
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from introspect_cli.compare.changes.clues import Line
    from introspect_cli.compare.changes.parsed import Statement
    from introspect_cli.compare.changes.program import Depths
    from introspect_cli.compare.changes.statements import Change


class Version:
    """One version, and how near each of its statements is to the divergence."""

    def __init__(
        self,
        program: Program,
        clues: Clues,
        named: Iterable[tuple[str, int]],
        spans: Iterable[tuple[str, int, int]] = (),
        bounds: tuple[Line | None, Line | None] = (None, None),
    ) -> None:
        self.program, self.clues = program, clues
        roots = program.calling(clues.roots)
        models = clues.models | {key[1] for root in roots for key in root.defines if key[0] not in {".", "="}}
        models |= program.handed(models)
        recorded = frozenset(statement for file, line in named for statement in program.at(file, line, line))
        self.at = at = CodePlace(program, clues, recorded, models)
        self.computes = COMPUTES[clues.reason](at) if clues.reason in COMPUTES else {}
        leading = self._leading() if clues.reason in {"rng", "initial"} else {}
        self.builds = merged(program.behind([*recorded, *self.computes, *self._built()], models), leading)
        self.of_models = (
            program.behind(program.calling(clues.roots)) if clues.reason in {"rng", "initial"} else self.builds
        )
        self.between = program.loop() if clues.reason in _OF_STEPS else set()
        if clues.reason == "script" or clues.gap:
            self.between |= program.in_steps()
        if clues.reason in {"rng", "initial"}:  # what is built beside a draw on record may draw before it
            self.between |= {near for each in recorded if each.scope for near in program.by_place[each.place]}
        if clues.gap or clues.reason == "propagated":
            modes = {place for name in program.classes for place in program.methods(name, *MODES)}
            self.between |= {*loss(at), *gradient(at), *optimizer(at), *program.forwards(), *program.calling(MODES)}
            self.between |= program.within(modes).keys()
        self.ran, self.later = self._ran(*bounds)
        self.between |= {inside for file, first, last in spans for inside in program.at(file, first + 1, last)}

    @cached_property
    def unmentioned(self) -> set[Statement]:
        """What did not run by its names; nothing where no script is on record."""
        return self.program.unmentioned(self.clues.scripts) if all(self.clues.scripts) and self.clues.scripts else set()

    def nearness(self, statement: Statement) -> tuple[int, int]:
        """Place in the order of nearness, and depth."""
        if not _can_matter(statement):
            return ORDER.index(Nearness.ELSEWHERE), 0
        if statement in self.at.recorded:
            return ORDER.index(Nearness.RECORDED), 0
        if statement in self.ran and any(statement in near for near in (self.computes, self.builds, self.between)):
            return ORDER.index(Nearness.RECORDED), 1
        more = self.program.is_conditional(statement.place) + _FAR * (statement in self.later)
        for nearness, depths in ((Nearness.COMPUTES, self.computes), (Nearness.BUILDS, self.builds)):
            if statement in depths:
                beside = nearness is Nearness.BUILDS and statement not in self.of_models  # given to something else, too
                return ORDER.index(nearness), depths[statement] + more + beside + self._of_another(statement)
        return ORDER.index(Nearness.BETWEEN if statement in self.between else Nearness.ELSEWHERE), 0

    def _ran(self, low: Line | None, high: Line | None) -> tuple[set[Statement], set[Statement]]:
        """What ran between the last record that agreed and the first that did not; and what runs only after that."""
        if self.clues.reason not in _BY_LINE or self.clues.gap or high is None:
            return set(), set()
        program = self.program
        first, last = (
            min(program.at(*line, line[1]), key=_size, default=None) if line else None for line in (low, high)
        )
        if last is None:
            return set(), set()
        if first is not None and first.place != last.place and self.clues.kind is Kind.OUTPUT:
            return {each for each in program.by_place[first.place] if each.last >= first.first}, set()
        around = {head for head in last.around if isinstance(head.node, (ast.For, ast.AsyncFor, ast.While))}
        beside = program.by_place[last.place]
        later = {each for each in beside if each.first > last.last and not around.intersection(each.around)}
        if first is None or first.place != last.place or first.first > last.first:
            return {last}, later
        return {each for each in beside if first.first <= each.first <= last.last}, later

    def _of_another(self, statement: Statement) -> bool:
        """Whether it is of the forward of another module than those that it is about."""
        if self.clues.reason not in _IN_MODULES or not statement.scope.endswith(".forward"):
            return False
        classes = *self.clues.classes, *self.clues.inside
        return all(statement.place not in self.program.methods(name, "forward") for name in classes)

    def _leading(self) -> Depths:
        """What calls the functions in which the lines on record stand, or hands them on to be called."""
        depths: Depths = {}
        edge = {statement.place for statement in self.at.recorded}
        for depth in range(1, _MOST_CALLS):
            callers = [caller for place in edge for caller in self.program.callers_of(place) if caller not in depths]
            depths |= dict.fromkeys(callers, depth)
            edge = {statement.place for statement in callers}
        return depths

    def _built(self) -> set[Statement]:
        """Where the modules that it is about are built and set up."""
        program, clues = self.program, self.clues
        if clues.reason in {"rng", "initial", "structure"}:
            return program.calling(clues.roots) | program.calling(clues.classes)
        if clues.reason == "optimizer":
            return program.calling(LOADS)
        if clues.reason == "loss":
            return program.calling(filter(LOSS.search, clues.roots))
        if clues.reason not in _OF_MODULES:
            return set()
        building: set[Statement] = set()
        for name, attribute in zip(clues.classes[:2], clues.attributes, strict=False):
            calls = program.calling([name])
            building |= calls.intersection(self.at.defining(attribute)) or calls  # `self.drop = nn.Dropout()`
            building |= program.within(program.methods(name, "__init__")).keys()
            building |= {
                statement for place in program.by_place for statement in program.by_place[place] if place[1] == name
            }
            if clues.reason == "module":
                break
        return building | (program.calling(MODES) if clues.words & {"training", "train"} else set())


_MOST_CALLS = 5
_BY_LINE = words("own_code script loss gradient")
"""Reasons for which the cause is in what ran between two records, not in what was made before."""
_OF_MODULES = words("module own_code op buffer backward")
_IN_MODULES = words("module own_code op buffer by_hand")
_OF_STEPS = words("rng structure outside initial script gradient resumed propagated optimizer")
"""Reasons for which all that a step runs is between the last record that agreed and the first that did not."""


_IN_EXPRESSION = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP}


def ranked(
    changes: Sequence[Change], texts: tuple[Mapping[str, str], Mapping[str, str]], clues: Clues | None
) -> tuple[Ranked, ...]:
    """Changes, the most likely cause first."""
    if clues is None or not changes:
        return tuple(Ranked(change, Nearness.ELSEWHERE) for change in changes)
    of_sides = zip(texts, clues.lines, clues.spans, clues.bounds, strict=True)
    sides = [Version(Program(files), clues, lines, spans, bounds) for files, lines, spans, bounds in of_sides]
    placed = [_nearest(change, sides, clues) for change in changes]
    return tuple(sorted(placed, key=lambda one: (ORDER.index(one.nearness), -one.hits, one.depth)))


def _nearest(change: Change, sides: Sequence[Version], clues: Clues) -> Ranked:
    words = _changed_words(change)
    every = {word for side in (change.a, change.b) if side is not None for word in _words_in(side.text)}
    hits = 2 * len(words & clues.words) + len(every & clues.words)
    passive = _takes_other_parameters(change) or _is_overridden(change, sides) or _never_ran(change, clues)
    best, ran, surely, matters = (ORDER.index(Nearness.ELSEWHERE), 0), False, False, False
    files = change.file_a or change.file, change.file
    for file, side, version in zip(files, (change.a, change.b), sides, strict=True):
        if side is None:
            continue
        last = sys.maxsize if change.unit == "file" else side.last
        inside = version.program.at(file, side.first, last)
        best = min([best, *map(version.nearness, inside)])
        ran |= not inside or not inside <= version.unmentioned
        surely |= not all(version.program.is_conditional(statement.place) for statement in inside)
        matters |= any(map(_can_matter, inside))
    passive = passive or not ran
    hits, depth = hits if surely and not passive else 0, best[1] + _FAR * passive
    return Ranked(change, ORDER[best[0]], depth, hits, can_matter=matters and not passive)


def _size(statement: Statement) -> int:
    return statement.last - statement.first


def _can_matter(statement: Statement) -> bool:
    """Whether it may change a number by itself."""
    return not (statement.only_tells or isinstance(statement.node, (ast.Import, ast.ImportFrom, ast.Pass, ast.Assert)))


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


_MODULE = re.compile(r"class (\w+)\([\w., ]*\bModule\b")
_FUNCTION = re.compile(r"(async )?def \w")


def _never_ran(change: Change, clues: Clues) -> bool:
    """Whether one version alone has it, and it does nothing by itself.

    A class of modules of which neither run has one; a function, for what calls it changed with it.
    """
    alone = change.a if change.b is None else change.b if change.a is None else None
    if alone is None:
        return False
    match = _MODULE.match(alone.text)
    unused = match is not None and bool(clues.ran) and match[1] not in clues.ran
    return unused or (_FUNCTION.match(alone.text) is not None and "." not in change.scope)


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
    counts = [Counter(_words_in(side.text)) if side is not None else Counter() for side in (change.a, change.b)]
    return set((counts[0] - counts[1]) + (counts[1] - counts[0])) or set(counts[0] + counts[1])


def _words_in(text: str) -> Iterable[str]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _IN_EXPRESSION:
                yield from re.findall(r"[\w.]+", token.string) if token.type == tokenize.STRING else [token.string]
    except (tokenize.TokenError, IndentationError, SyntaxError):
        yield from re.findall(r"\w+", text)

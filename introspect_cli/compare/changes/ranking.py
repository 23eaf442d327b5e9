"""Changed statements, the one first that most likely made the runs diverge.

The records say where the runs diverge and what was equal before. So the code that computes that place is known by name:
the forward of a module and what it calls, the loss before `backward`, what stands between `backward` and the
optimizer's step, the data set, the seeds. A change in there comes first; then one in what builds it or gives it its
values; then one in what ran between the last thing that agreed and the first that did not. Any other change cannot
matter to that place as far as names tell, and is never called likely.

A setting that is a changed file is told by its most likely statement; where nothing changed, what is left is told.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.nearness import ORDER, Nearness, Version
from introspect_cli.compare.changes.program import Program
from introspect_cli.compare.evidence import RANDOM, Known

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from introspect_cli.compare.changes.computes import Clues
    from introspect_cli.compare.changes.statements import Change
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.result import SettingChange


_IN_EXPRESSION = {tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP}


@dataclass(frozen=True)
class Ranked:
    """A changed statement and how near to the divergence it is.

    Attributes:
        change: the change.
        nearness: how near.
        depth: statements between it and the code that computes the place, as far as values are followed by name.
        hits: how many of the names that the records point to are in what changed.
        above: the line above it.
    """

    change: Change
    nearness: Nearness
    depth: int = 0
    hits: int = 0
    above: str = ""

    @property
    def likely(self) -> bool:
        """Whether it can matter to the place where the runs diverge."""
        return self.nearness is not Nearness.ELSEWHERE


@dataclass(frozen=True)
class CodeChanges:
    """How the source files of two runs differ.

    Attributes:
        ranked: changed statements, the most likely cause first.
        in_comments: files that differ in comments, formatting or the order of definitions alone.
        in_names: files that differ in the names of variables, and in comments, alone.
        unread: files that differ and of which a text is not there, with why: `text` (a run did not keep it), `secret`
            (only what was redacted can differ, or comments), `binary`.
        compared: how many files both runs have digests of.
    """

    ranked: tuple[Ranked, ...] = ()
    in_comments: tuple[str, ...] = ()
    in_names: tuple[str, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    compared: int = 0

    @property
    def likely(self) -> tuple[Ranked, ...]:
        """Those that can matter to the place where the runs diverge."""
        return tuple(one for one in self.ranked if one.likely)

    @property
    def files(self) -> int:
        """In how many files statements changed."""
        return len({one.change.file for one in self.ranked})


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


# --- what that means for the settings that are told

_WEIGHTS = {Nearness.RECORDED: 0.98, Nearness.COMPUTES: 0.95, Nearness.BUILDS: 0.85, Nearness.BETWEEN: 0.7}
_UNLIKELY = 0.45
_IN_COMMENTS = 0.05
_SHOWN = 60
_BEFORE = 24
"""Characters of a statement that are shown, and of these before what differs."""
_NOISE = 0.1
"""Weight of a setting up to which it says where results go, or names a machine."""
_DOCUMENTS = ("sources", "packages", "command")


def with_code(
    settings: tuple[SettingChange, ...], code: CodeChanges | None, *, rounding: bool = False
) -> tuple[SettingChange, ...]:
    """Settings that differ, a changed file told by the statement of it that is most likely the cause.

    One that changed in comments alone, or in nothing that can matter to the place, explains nothing.

    Args:
        settings: the strongest explanation first.
        code: how the source files differ.
        rounding: whether the distance is of the size of rounding: flags and libraries keep their place before code.
    """
    if code is None:
        return settings
    best: dict[str, Ranked] = {}
    for one in code.ranked:
        best.setdefault(one.change.file, one)
    weighed = [
        _with_statement(change, best.get(change.name), code, rounding=rounding)
        if change.source == "sources"
        else change
        for change in settings
    ]
    place = {file: number for number, file in enumerate(best)}  # of two files that weigh the same, the nearer one
    return tuple(
        sorted(
            weighed,
            key=lambda setting: (-setting.weight, place.get(setting.name, 0) if setting.source == "sources" else 0),
        )
    )


def _with_statement(change: SettingChange, best: Ranked | None, code: CodeChanges, *, rounding: bool) -> SettingChange:
    if change.name in code.in_comments:
        return replace(change, b="changed, in comments alone", explains=False, weight=_IN_COMMENTS)
    if change.name in code.in_names:
        return replace(change, b="changed, in the names of variables alone", explains=False, weight=_IN_COMMENTS)
    if best is None or not change.explains:
        return change
    if not best.likely:
        return replace(change, explains=False, weight=min(change.weight, _UNLIKELY))
    weight = change.weight if rounding else _WEIGHTS[best.nearness]
    if best.change.unit == "file":
        return replace(change, weight=weight)
    return replace(change, b=f"changed at {statement_words(best)}", weight=weight)


def statement_words(one: Ranked) -> str:
    """`line 41 (Net.forward): return x / 2 -> return x / 3`, or `line 26: added def accuracy()`, moved, or removed."""
    change = one.change
    where = f" ({change.scope})" if change.scope else ""
    if change.a and change.b and change.a.text == change.b.text:
        return f"line {change.b.first}{where}: moved {_head(change.b.text)}"
    if change.a and change.b:
        return f"line {change.b.first}{where}: {' -> '.join(_apart(change.a.text, change.b.text))}"
    side, what = (change.b, "added") if change.b else (change.a, "removed")
    return f"line {side.first}{where}: {what} {_head(side.text)}" if side else ""


def _apart(*texts: str) -> list[str]:
    """Two versions of a statement; of long ones the part where they begin to differ."""
    whole = [" ".join(text.split()) for text in texts]
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*whole, strict=False))))
    start = whole[0].rfind(" ", 0, max(0, same - _BEFORE)) + 1 if max(map(len, whole)) > _SHOWN else 0
    return [_short(f"... {text[start:]}" if start else text) for text in whole]


def _head(text: str) -> str:
    """The first line of a statement, without what decorates it."""
    lines = [line.strip() for line in text.splitlines()]
    return _short(next((line for line in lines if not line.startswith("@")), lines[0]).removesuffix(":"))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def nothing_changed(scene: Scene, code: CodeChanges | None) -> tuple[str, ...]:
    """A sentence that nothing on record differs that could explain it, and what the evidence leaves; none else."""
    runs = scene.run_a, scene.run_b
    if code is None or any(name not in run.settings for run in runs for name in _DOCUMENTS):
        return ()
    differ = [change for change in scene.settings if change.weight > _NOISE]
    if code.ranked or code.unread or any(change.source != "hardware" for change in differ):
        return ()
    unseen = [] if all("environment" in run.settings for run in runs) else ["environment variables were not recorded"]
    comments = ", but for comments" if code.in_comments else ""
    comments = ", but for comments and the names of variables" if code.in_names else comments
    comments += ", but the hardware does" if differ else ""
    equal = f"No source file, setting or package on record differs{comments}"
    return (f"{equal}{f'; {unseen[0]}' if unseen else ''}. What is left: {_left(scene, _hardware(scene))}.",)


def _hardware(scene: Scene) -> str:
    """The hardware as a cause that is left, with what is on record of it."""
    for change in scene.settings:
        if change.source == "hardware":
            return f"the hardware ({change.name} {change.a} -> {change.b})"
    runs = scene.run_a, scene.run_b
    recorded = "the same as far as recorded" if all("hardware" in run.settings for run in runs) else "not on record"
    return f"the hardware ({recorded})"


def _left(scene: Scene, hardware: str) -> str:
    if scene.cause.reason == "rng":
        text = "randomness, from a generator that nothing on record seeded"
        return f"{text}, or {hardware}" if "->" in hardware else text
    random = [evidence.known for evidence in scene.cause.evidence if evidence.thing in RANDOM]
    race = "a race (threads, workers, memory that was never written)"
    if scene.rounding:
        race = "sums in another order (threads, atomics, kernels chosen by timing)"
    rest = f"{race}, {hardware}, or a file that the script reads"
    if random and _all_equal(random):
        return f"{rest}; the random states are equal, so randomness only from a generator of the script"
    return f"randomness (no random state is on record there), {rest}"


def _all_equal(evidence: Iterable[Known]) -> bool:
    return all(one is Known.EQUAL for one in evidence)

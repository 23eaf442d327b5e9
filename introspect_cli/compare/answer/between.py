"""Changes between the source files of two runs, the most likely cause of their divergence first.

Files are paired by name, the two scripts also under different names. A text comes from the run, or from the git clone
in the current directory, if that has the file with the recorded digest. Names, classes and lines that changes are
matched with come from the first divergence.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.endings import Raised, cut_short
from introspect_cli.compare.changes.clues import Clues, CodeChanges
from introspect_cli.compare.reasons.back import Handling, excluded, stale_share
from introspect_cli.compare.reasons.draws import drawn_otherwise
from introspect_cli.compare.reasons.update import changes as optimizer_settings
from introspect_cli.compare.settings.beginning import (
    MAY_REST_ON_THEM,
    MODES,
    differing_events,
    drawn_alike,
    seedings_that_differ,
    unseen_between,
    variables_that_differ,
)
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.settings.seedings import set_at
from introspect_cli.compare.terms.evidence import Known, Thing
from introspect_cli.compare.terms.names import ancestors, owner_of
from introspect_cli.store.read.source_texts import Sources
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from introspect_cli.compare.changes.clues import Line
    from introspect_cli.compare.changes.statements import Change
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.read.run import Run


_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PATH = re.compile(r"(?!/|-)(?!.*\.\.)[\w./ -]+\.py")
_SECONDS = 5
_MOST = 1 << 19
"""Characters of unchanged files that are parsed to see who calls whom: some seconds."""


def code_changes(a: Run, b: Run, scene: View | None, ended: Raised | None) -> CodeChanges | None:
    """Changes of source files, ranked by nearness to `scene` or to the exception `ended`.

    None where either run has no digests of its files.

    Raises:
        StoreError: the text of a file is damaged.
    """
    if any("sources" not in run.settings for run in (a, b)):
        return None
    one, two = _Texts(a), _Texts(b)
    renamed = _renamed(one, two)
    names = [name for name in dict.fromkeys([*one.digests, *two.digests]) if name not in renamed.values()]
    differing = [name for name in names if one.digests.get(name) != two.digests.get(renamed.get(name, name))]
    if not differing:
        return CodeChanges(compared=len(names))
    from introspect_cli.compare.changes.near import ranked
    from introspect_cli.compare.changes.project import changed_between

    unread: list[tuple[str, str]] = []
    sides: tuple[dict[str, str], dict[str, str]] = {}, {}
    wanted = {renamed.get(name, name) for name in differing}
    texts_b = two.all({}, wanted)
    for name in differing:
        other = renamed.get(name, name)
        texts = one.text(name), two.text(other)
        missing = [t is None and n in side.digests for t, n, side in zip(texts, (name, other), (one, two), strict=True)]
        if any(missing):
            unread.append((other, "text"))
            continue
        for side, text in zip(sides, texts, strict=True):
            if text is not None:
                side[other] = text
    changes, in_comments, in_names = changed_between(*sides, [renamed.get(name, name) for name in names])
    back = {new: old for old, new in renamed.items()}
    for quiet in (in_comments, in_names):
        for other in [o for o in quiet if not (one.exact(back.get(o, o)) and two.exact(o))]:
            quiet.remove(other)
            unread.append((other, "secret"))
    every = one.all(renamed, wanted) if changes else {}, texts_b
    clues = clues_of(scene) if scene is not None else clues_of_ending(ended) if ended is not None else None
    order = ranked(changes, every, clues)
    order = tuple(replace(each, above=_above(each.change, every)) for each in order)
    return CodeChanges(order, tuple(in_comments), tuple(in_names), tuple(unread), len(names))


def _above(change: Change, texts: tuple[Mapping[str, str], Mapping[str, str]]) -> str:
    """The nearest non-blank line above a change, in b's version, or in a's where the code was removed; "" for none."""
    side, text = (change.b, texts[1]) if change.b is not None else (change.a, texts[0])
    if side is None or change.unit == "file":
        return ""
    lines = text.get(change.file, "").splitlines()[: side.first - 1]
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _renamed(one: _Texts, two: _Texts) -> dict[str, str]:
    """Names of files in a, mapped to those in b where they differ: the scripts, then files with a unique basename."""
    left = [name for name in one.digests if name not in two.digests]
    right = [name for name in two.digests if name not in one.digests]
    names = {}
    if one.script in left and two.script in right:
        names[one.script] = two.script
    for name in left:
        same = [other for other in right if PurePath(other).name == PurePath(name).name]
        if name not in names and len(same) == 1 and same[0] not in names.values():
            names[name] = same[0]
    return names


class _Texts:
    """Source texts of one run by file name, stored with the run or read from the current directory's git clone."""

    def __init__(self, run: Run) -> None:
        self._sources = Sources(run)
        self.digests = self._sources.digests
        commit = run.settings.document("git").get("commit")
        self._commit = commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else ""
        script = PurePath(str(run.manifest.get("script") or "")).name
        named = [name for name in self.digests if PurePath(name).name == script]
        self.script = named[0] if len(named) == 1 else ""

    def text(self, name: str) -> str | None:
        """The text of a file; None where neither the run nor a git blob with the recorded digest has it."""
        if name in self._sources:
            return self._sources[name].text
        digest = self.digests.get(name)
        if digest is None or not self._commit or not _PATH.fullmatch(name):
            return None
        data = _content(f"{self._commit}:{name}")
        return data.decode("utf-8", "replace") if source_digest(data) == digest else None

    def exact(self, name: str) -> bool:
        """Whether a text is unredacted; True also for files read from git."""
        return name not in self._sources or self._sources[name].exact

    def all(self, renamed: Mapping[str, str], wanted: set[str]) -> dict[str, str]:
        """Texts by their names in b: all of `wanted`, others (same top directory first) up to `_MOST` characters."""
        texts: dict[str, str] = {}
        size = 0
        tops = {name.partition("/")[0] for name in wanted}

        def distance(name: str) -> tuple[bool, bool]:
            name = renamed.get(name, name)
            return name not in wanted, "/" in name and name.partition("/")[0] not in tops

        for name in sorted(self.digests, key=distance):
            text = self.text(name) if name in self._sources or renamed.get(name, name) in wanted else None
            if text is not None and (size < _MOST or renamed.get(name, name) in wanted):
                texts[renamed.get(name, name)] = text
                size += len(text)
        return texts


def _content(name: str) -> bytes:
    """The bytes of `commit:path` in the git clone of the current directory; b"" where git fails or lacks it."""
    import subprocess

    try:
        done = subprocess.run(  # noqa: S603 - no shell; the name was checked
            ["git", "cat-file", "blob", name],  # noqa: S607 - the user's own git
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""


_LINE = re.compile(r"(.+):(\d+)\Z")
_INDEX = re.compile(r"\d+")


def clues_of(scene: View) -> Clues:
    """The names, classes and lines in a first divergence's records that a code change can be matched with."""
    cause, site = scene.cause, scene.site
    tree = scene.step.modules[0] | scene.step.modules[1]
    subject = cause.module or cause.subject or site.fqn
    around = owner_of(subject) if cause.reason == "structure" else subject
    replaced = scene.classes_of(around) if cause.reason in {"structure", "own_code", "module"} else ()
    subject = scene.parameter_user if cause.reason == "gradient" else around if replaced else subject
    names = [name for name in (subject, *ancestors(subject)) if name in tree]
    tuned = optimizer_settings(scene) if cause.reason == "optimizer" else scene.hyperparameters
    words = {word for change in tuned for word in (change.name.rpartition(".")[2], change.about)}
    for name in (*names[:1], *scene.unseen_inside):
        words |= _attributes_that_differ(scene.step.modules, name)
    if cause.reason in {"initial", "outside"}:
        words.add(site.fqn.rpartition(".")[2])
    words |= {*replaced} | ({_last(cause.subject)} if cause.subject else set())
    if scene.first.a is not None and scene.first.b is not None:
        dtypes = scene.first.a.layout.dtype, scene.first.b.layout.dtype
        words |= set(dtypes) | {"autocast", "to", "half", "float", "dtype"} if dtypes[0] != dtypes[1] else set()
    # all steps before agree: a condition on the number of this one is a hint
    late = {str(scene.first.step)} if scene.first.step > 1 and scene.steps_before else set()
    if scene.calls is not None and cause.reason in {"structure", "loss"}:
        few, many = sorted(scene.calls[1:])
        late |= {str(number) for number in (few, many, many // max(few, 1)) if number > 1}
    words |= _handling(scene) if cause.reason == "gradient" else set()
    words |= {*MODES} if cause.reason == "batch" and drawn_otherwise(scene) else set()
    between: tuple[list[tuple[str, str]], ...] = [], []
    lines: list[list[str]] = [[scene.first.source if scene.first.a is not None else ""], []]
    if (ended := cut_short(scene)) is not None and ended.file:
        lines[ended.side == "b"].append(f"{ended.file}:{ended.line}")
    filled = site.fqn if cause.reason == "initial" else ""
    begins = cause.reason in {"rng", "initial", "structure", "batch"} and scene.is_first_step
    if begins and not (filled and drawn_alike(scene.runs, scene.first.rank, filled)):
        between = unseen_between(scene.runs, scene.first.rank)
        began = differing_events(scene.runs, scene.first.rank, filled)
        for places, events in zip(lines, began, strict=True):
            # what a module draws tells nothing of why one run has no such module
            events_there = [event for event in events if cause.reason != "structure" or event.name == subject]
            places += [event.line for event in events_there]
            words |= {word for event in events_there for word in event.name.split(".")[-2:]}
            words |= {"train", "eval"} if any(event.by in MODES for event in events_there) else set()
    if cause.reason == "rng" and not scene.is_first_step:
        for places, settings in zip(lines, set_at(scene.runs, scene.first), strict=True):
            places += [setting.line for setting in settings]
    if scene.is_first_step and scene.tells in MAY_REST_ON_THEM:
        for places, events in zip(lines, seedings_that_differ(scene.runs, scene.first.rank), strict=True):
            places += [event.line for event in events]
        words |= {*variables_that_differ(scene.runs, scene.first.rank)}
    reason = "structure" if replaced else cause.instead or cause.reason
    return Clues(
        reason="by_hand" if cause.rests_on(Thing.REWRITTEN) else reason,
        gap=cause.reason == "gap",
        classes=tuple(tree[name].module_class for name in names),
        attributes=tuple(_last(name) for name in names),
        inside=tuple({tree[name].module_class: 0 for name in scene.unseen_inside}),
        before=_last(cause.before),
        models=frozenset(_last(module.variable) for module in tree.values() if module.variable),
        optimizers=tuple(dict.fromkeys(name.partition("#")[0] for side in scene.steppers for name in side)),
        words=frozenset(word for word in words if len(word) > 1 and not _INDEX.fullmatch(word)) | late,
        lines=(_parsed(lines[0]), _parsed(lines[1])),
        spans=(_spans(between[0]), _spans(between[1])),
        bounds=_bounds(scene),
        kind=site.kind,
        tensor=site.fqn.rpartition(".")[2],
        roots=tuple({module.module_class: 0 for name, module in tree.items() if "." not in name}),
        at_start=scene.is_first_step,
        ran=frozenset(module.module_class for module in tree.values()),
        scripts=frozenset(PurePath(str(run.manifest.get("script") or "")).name for run in scene.runs),
        batch_is_equal=any(places.known is Known.EQUAL for places in cause.rests_on(Thing.BATCHES)),
    )


def _bounds(scene: View) -> tuple[tuple[Line | None, Line | None], tuple[Line | None, Line | None]]:
    """Lines of the last record that agrees and the first that differs: (a's two, b's two); None where unknown."""
    from introspect_cli.compare.step.step import lines_around

    one, two = (
        [next(iter(_parsed([line])), None) for line in lines] for lines in lines_around(scene.step, scene.position)
    )
    return (one[0], one[1]), (two[0], two[1])


def _handling(scene: View) -> set[str]:
    """Names of calls that may have changed the gradient (`clip_grad_norm_`, `zero_grad`), less what records exclude."""
    if stale_share(scene.step, scene.position)[0]:
        return set(Handling.ZERO_GRAD.calls)
    gone = excluded(scene)
    names = {word for handling in Handling if handling not in gone for word in handling.calls}
    return names | ({"clip_grad_value_"} if Handling.CLIPPING in gone else set())


def clues_of_ending(ending: Raised) -> Clues:
    """Clues where one run alone ended by an exception: the line that raised."""
    line = ((ending.file, ending.line),) if ending.file else ()
    return Clues("raised", lines=((), line) if ending.side == "b" else (line, ()))


def _parsed(lines: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """`model.py:41` as `("model.py", 41)`; lines of another form are left out."""
    return tuple((match[1], int(match[2])) for line in lines if (match := _LINE.fullmatch(line)))


def _spans(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, int, int], ...]:
    """Pairs of lines as (file, first, last); pairs in two different files are left out."""
    ends = [parsed for pair in pairs if len(parsed := _parsed(pair)) == 2]
    return tuple((file, first, last) for (file, first), (other, last) in ends if file == other)


def _last(name: str) -> str:
    """The last part of a dotted name that is no number: `blocks` of `blocks.3`; "" for none."""
    return next((part for part in reversed(name.split(".")) if not _INDEX.fullmatch(part)), "")


def _attributes_that_differ(trees: Iterable[dict[str, ModuleInfo]], name: str) -> set[str]:
    """Names of a module's attributes that differ between the runs; with `train`, `eval` if `training` does."""
    one, two = (dict(tree[name].attributes) if name in tree else {} for tree in trees)
    keys = {key for key, _, _ in unequal(one, two)} if one and two else set()
    return keys | {"train", "eval"} if "training" in keys else keys

"""Changes between the source files of two runs, the most likely cause of their divergence first.

Files are paired by name, the two scripts also under different names. A text comes from the run, or from the git clone
in the current directory, if that has the file with the recorded digest. Names, classes and lines that changes are
matched with come from the first divergence.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.endings import Raised, cut_short
from introspect_cli.compare.changes.statements import Clues, CodeChanges
from introspect_cli.compare.evidence import Known, Thing
from introspect_cli.compare.names import ancestors, owner_of
from introspect_cli.compare.reasons.draws import is_drawn_otherwise
from introspect_cli.compare.reasons.update import hyperparameter_changes_of as optimizer_settings
from introspect_cli.compare.settings.beginning import (
    MAY_REST_ON_THEM,
    MODES,
    differing_calls,
    last_fillings,
    partings,
    script_seedings,
    variables_that_differ,
)
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.store.run import Sources
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from introspect_cli.compare.changes.statements import Bounds
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.settings.beginning import Event
    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.run import Run


_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PATH = re.compile(r"(?!/|-)(?!.*\.\.)[\w./ -]+\.py")
_SECONDS = 5
_MOST = 1 << 19
"""Characters of unchanged files that are parsed to see who calls whom: some seconds."""


def code_changes(a: Run, b: Run, scene: View | None, ended: Raised | None) -> CodeChanges | None:
    """Changes of source files, ranked by nearness to the first divergence, or to the exception that ended a run.

    None where either run has no digests of its files. Files have their names in b. May run git to read texts. A file
    that seems to differ in comments or names alone is `unread` where what was redacted may differ too.

    Args:
        a: one run.
        b: the other run.
        scene: the first divergence; None for none.
        ended: the exception that ended one run alone, used where `scene` is None.

    Raises:
        StoreError: the text of a file is damaged.
    """
    if any("sources" not in run.settings for run in (a, b)):
        return None
    one, two = _SourceTexts(a), _SourceTexts(b)
    renamed = _names_in_b(one, two)
    names = [name for name in dict.fromkeys([*one.digests, *two.digests]) if name not in renamed.values()]
    differing = [name for name in names if one.digests.get(name) != two.digests.get(renamed.get(name, name))]
    if not differing:
        return CodeChanges(compared=len(names))
    from introspect_cli.compare.changes.near import ranked
    from introspect_cli.compare.changes.project import changed_between

    unread: list[tuple[str, str]] = []
    sides: tuple[dict[str, str], dict[str, str]] = {}, {}
    wanted = {renamed.get(name, name) for name in differing}
    texts_b = two.texts({}, wanted)
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
        for other in [o for o in quiet if not (one.is_unredacted(back.get(o, o)) and two.is_unredacted(o))]:
            quiet.remove(other)
            unread.append((other, "secret"))
    every = one.texts(renamed, wanted) if changes else {}, texts_b
    clues = clues_of(scene) if scene is not None else clues_of_ending(ended) if ended is not None else None
    return CodeChanges(ranked(changes, every, clues), tuple(in_comments), tuple(in_names), tuple(unread), len(names))


def _names_in_b(one: _SourceTexts, two: _SourceTexts) -> dict[str, str]:
    """Files that have another name in b, a's name to b's.

    The two scripts, then files with one partner of their basename.
    """
    left = [name for name in one.digests if name not in two.digests]
    right = [name for name in two.digests if name not in one.digests]
    names = {one.script: two.script} if one.script in left and two.script in right else {}
    for name in left:
        same = [other for other in right if PurePath(other).name == PurePath(name).name]
        if name not in names and len(same) == 1 and same[0] not in names.values():
            names[name] = same[0]
    return names


class _SourceTexts:
    """Source texts of one run by file name, stored with the run or read from the current directory's git clone."""

    def __init__(self, run: Run) -> None:
        """Read the names and digests of the run's source files and its git commit.

        `script` is the file with the script's basename, "" unless there is exactly one. Texts are read when they are
        asked for.
        """
        self._sources = Sources(run)
        self.digests = self._sources.digests
        commit = run.settings.document("git").get("commit")
        self._commit = commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else ""
        script = PurePath(str(run.manifest.get("script") or "")).name
        named = [name for name in self.digests if PurePath(name).name == script]
        self.script = named[0] if len(named) == 1 else ""

    def text(self, name: str) -> str | None:
        """The text of a file: of the run, else of git if its digest is the recorded one; None where neither has it."""
        if name in self._sources:
            return self._sources[name].text
        digest = self.digests.get(name)
        if digest is None or not self._commit or not _PATH.fullmatch(name):
            return None
        data = _git_blob(f"{self._commit}:{name}")
        return data.decode("utf-8", "replace") if source_digest(data) == digest else None

    def is_unredacted(self, name: str) -> bool:
        """Whether nothing was redacted in the text that the run keeps; True for files that it does not keep."""
        return name not in self._sources or self._sources[name].exact

    def texts(self, renamed: Mapping[str, str], wanted: set[str]) -> dict[str, str]:
        """Texts by their names in b.

        All of `wanted`, and others that the run keeps until `_MOST` characters are reached.

        Of the others, those in the top directories of `wanted` come first.

        Args:
            renamed: names in this run to names in b, where they differ.
            wanted: names in b.
        """
        texts: dict[str, str] = {}
        size = 0
        tops = {name.partition("/")[0] for name in wanted}

        def distance(name: str) -> tuple[bool, bool]:
            """Sort key: names that are wanted, those in no directory or in a top directory of these, the rest."""
            name = renamed.get(name, name)
            return name not in wanted, "/" in name and name.partition("/")[0] not in tops

        for name in sorted(self.digests, key=distance):
            in_b = renamed.get(name, name)
            text = self.text(name) if name in self._sources or in_b in wanted else None
            if text is not None and (size < _MOST or in_b in wanted):
                texts[in_b] = text
                size += len(text)
        return texts


def _git_blob(name: str) -> bytes:
    """Bytes of `commit:path` in the git clone of the current directory; b"" where git fails or does not have it.

    Runs `git cat-file` and waits at most `_SECONDS`.
    """
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
    """The names, classes and lines in a first divergence's records by which a code change can be recognised."""
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
    words |= {*replaced} | ({_last_part(cause.subject)} if cause.subject else set())
    if scene.first.a is not None and scene.first.b is not None:
        dtypes = scene.first.a.layout.dtype, scene.first.b.layout.dtype
        words |= set(dtypes) | {"autocast", "to", "half", "float", "dtype"} if dtypes[0] != dtypes[1] else set()
    words |= {*MODES} if cause.reason == "batch" and is_drawn_otherwise(scene) else set()
    lines = _recorded_lines(scene)
    begins = cause.reason in {"rng", "initial", "structure", "batch"} and scene.is_first_step
    for events, place in zip(_suspect_events(scene) if begins else (), lines, strict=False):
        # what a module draws tells nothing of why one run has no such module
        events_there = [event for event in events if cause.reason != "structure" or event.name == subject]
        place.extend(event.line for event in events_there)
        words |= {word for event in events_there for word in event.name.split(".")[-2:]}
        words |= {*MODES} if any(event.by in MODES for event in events_there) else set()
    if scene.is_first_step and scene.explained_reason in MAY_REST_ON_THEM:
        words |= {*variables_that_differ(scene.runs, scene.first.rank)}
    reason = "structure" if replaced else cause.instead or cause.reason
    return Clues(
        reason="by_hand" if cause.rests_on(Thing.REWRITTEN) else reason,
        gap=cause.reason == "gap",
        classes=tuple(tree[name].module_class for name in names),
        attributes=tuple(_last_part(name) for name in names),
        inside=tuple({tree[name].module_class: 0 for name in scene.unseen_inside}),
        bounds=_bounding_lines(scene),
        models=frozenset(_last_part(module.variable) for module in tree.values() if module.variable),
        optimizers=tuple(dict.fromkeys(name.partition("#")[0] for side in scene.steppers for name in side)),
        words=frozenset(word for word in words if len(word) > 1 and not _INDEX.fullmatch(word)),
        lines=(_parsed_lines(lines[0]), _parsed_lines(lines[1])),
        kind=site.kind,
        tensor=site.fqn.rpartition(".")[2],
        roots=tuple({module.module_class: 0 for name, module in tree.items() if "." not in name}),
        ran=frozenset(module.module_class for module in tree.values()),
        scripts=frozenset(PurePath(str(run.manifest.get("script") or "")).name for run in scene.runs),
        batch_is_equal=any(places.known is Known.EQUAL for places in cause.rests_on(Thing.BATCHES)),
    )


def _recorded_lines(scene: View) -> tuple[list[str], list[str]]:
    """Lines of the user's code (`file:line`) on record that may be to blame: of a, of b.

    That of the first divergence (a alone), of an exception that cut the step off, of calls that set a random state,
    and, in the first step, of the first seeding that differs.
    """
    lines: tuple[list[str], list[str]] = [scene.first.source if scene.first.a is not None else ""], []
    if (ended := cut_short(scene)) is not None and ended.file:
        lines[ended.side == "b"].append(f"{ended.file}:{ended.line}")
    if scene.cause.reason == "rng" and not scene.is_first_step:
        for places, settings in zip(lines, differing_calls(scene.runs, scene.first), strict=True):
            places.extend(setting.line for setting in settings)
    if scene.is_first_step and scene.explained_reason in MAY_REST_ON_THEM:
        for places, event in zip(lines, script_seedings(scene.runs, scene.first.rank).first, strict=True):
            places.extend([event.line] if event is not None else [])
    return lines


def _is_drawn_alike(scene: View) -> bool:
    """Whether an initial value was last filled by one function, from equal state, with equal arguments, in both runs.

    False for other reasons than `initial`, or where that is not on record.
    """
    one, two = (
        last_fillings(scene.runs, scene.first.rank, scene.site.fqn) if scene.cause.reason == "initial" else (None, None)
    )
    same = one is not None and two is not None and (one.state, one.by, one.arguments)
    return bool(same) and two is not None and same == (two.state, two.by, two.arguments)


def _suspect_events(scene: View) -> tuple[list[Event], list[Event]]:
    """Seedings and draws before the first step that may be what differs: of a, of b.

    For an initial value also its last filling, where function or arguments differ. Both are [] where an initial value
    was filled alike (`_is_drawn_alike`).
    """
    if _is_drawn_alike(scene):
        return [], []
    suspects = [parted.suspects for parted in partings(scene.runs, scene.first.rank)]
    events = [event for one, _ in suspects for event in one], [event for _, two in suspects for event in two]
    if scene.cause.reason == "initial":
        filled = last_fillings(scene.runs, scene.first.rank, scene.site.fqn)
        given = [event and (event.by, event.arguments) for event in filled]
        for there, event in zip(events, filled if given[0] != given[1] else (), strict=False):
            there.extend([event] if event is not None else [])
    return events


def _bounding_lines(scene: View) -> tuple[Bounds, Bounds]:
    """For each run, the line of the last record that agrees and that of the first that differs; None where unknown."""
    from introspect_cli.compare.step import lines_around

    one, two = (
        [next(iter(_parsed_lines([line])), None) for line in lines]
        for lines in lines_around(scene.step, scene.position)
    )
    return (one[0], one[1]), (two[0], two[1])


def clues_of_ending(ending: Raised) -> Clues:
    """Clues where an exception ended one run alone: the innermost line of the user's code that it left.

    No line where there is none.
    """
    line = ((ending.file, ending.line),) if ending.file else ()
    return Clues("raised", lines=((), line) if ending.side == "b" else (line, ()))


def _parsed_lines(lines: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """`model.py:41` as `("model.py", 41)`; lines of another form are left out."""
    return tuple((match[1], int(match[2])) for line in lines if (match := _LINE.fullmatch(line)))


def _last_part(name: str) -> str:
    """The last part of a dotted name that is no number: `blocks` of `blocks.3`; "" for none."""
    return next((part for part in reversed(name.split(".")) if not _INDEX.fullmatch(part)), "")


def _attributes_that_differ(trees: Iterable[dict[str, ModuleInfo]], name: str) -> set[str]:
    """Names of attributes of module `name` that differ in both trees, with `train` and `eval` if `training` does.

    set() where a tree has no such module, or no attributes of it.
    """
    one, two = (dict(tree[name].attributes) if name in tree else {} for tree in trees)
    keys = {key for key, _, _ in unequal(one, two)} if one and two else set()
    return keys | {"train", "eval"} if "training" in keys else keys

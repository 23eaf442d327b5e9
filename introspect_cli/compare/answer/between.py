"""Changes between the source files of two runs, the most likely cause of their divergence first.

Files are paired by name, the two scripts also under different names. Names, classes and lines that changes
are matched with come from the first divergence.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.compared import Raised, cut_short
from introspect_cli.compare.changes.statements import Clues, CodeChanges
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
from introspect_cli.compare.terms.evidence import Known, Thing
from introspect_cli.compare.terms.names import ancestors, owner_of
from introspect_cli.store.read.source_texts import Sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.settings.beginning import Event
    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.read.run import Run


_MOST = 1 << 19
"""Characters of unchanged files that are parsed to see who calls whom: some seconds."""


def code_changes(a: Run, b: Run, scene: View | None, ended: Raised | None) -> CodeChanges | None:
    """Changes of source files, ranked by nearness to the first divergence, or to the exception that ended a run.

    None where either run has no digests of its files. Files have their names in b. A file that seems to
    differ in comments or names alone is `unread` where what was redacted may differ too.

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
    one, two = Sources(a), Sources(b)
    renamed = _names_in_b((a, b), one, two)
    names = [name for name in dict.fromkeys([*one.digests, *two.digests]) if name not in renamed.values()]
    differing = [name for name in names if one.digests.get(name) != two.digests.get(renamed.get(name, name))]
    if not differing:
        return CodeChanges(compared=len(names))
    from introspect_cli.compare.changes.near import ranked
    from introspect_cli.compare.changes.project import changed_between

    unread: list[tuple[str, str]] = []
    sides: tuple[dict[str, str], dict[str, str]] = {}, {}
    wanted = {renamed.get(name, name) for name in differing}
    texts_b = _texts_of(two, {}, wanted)
    for name in differing:
        other = renamed.get(name, name)
        versions = (one, name), (two, other)
        if any(file in kept.digests and file not in kept for kept, file in versions):
            unread.append((other, "text"))
            continue
        for texts, (kept, file) in zip(sides, versions, strict=True):
            if file in kept:
                texts[other] = kept[file].text
    changes, in_comments, in_names = changed_between(*sides, [renamed.get(name, name) for name in names])
    back = {new: old for old, new in renamed.items()}
    for quiet in (in_comments, in_names):
        for other in [o for o in quiet if not (one[back.get(o, o)].exact and two[o].exact)]:
            quiet.remove(other)
            unread.append((other, "secret"))
    every = _texts_of(one, renamed, wanted) if changes else {}, texts_b
    clues = clues_of(scene) if scene is not None else clues_of_ending(ended) if ended is not None else None
    return CodeChanges(ranked(changes, every, clues), tuple(in_comments), tuple(in_names), tuple(unread), len(names))


def _names_in_b(runs: tuple[Run, Run], one: Sources, two: Sources) -> dict[str, str]:
    """Files that have another name in b, a's name to b's.

    The two scripts, then files with one partner of their basename.
    """
    left = [name for name in one.digests if name not in two.digests]
    right = [name for name in two.digests if name not in one.digests]
    scripts = [PurePath(str(run.manifest.get("script") or "")).name for run in runs]
    named = [
        [n for n in side if PurePath(n).name == script] for side, script in zip((left, right), scripts, strict=True)
    ]
    names = {named[0][0]: named[1][0]} if len(named[0]) == len(named[1]) == 1 else {}
    for name in left:
        same = [other for other in right if PurePath(other).name == PurePath(name).name]
        if name not in names and len(same) == 1 and same[0] not in names.values():
            names[name] = same[0]
    return names


def _texts_of(sources: Sources, renamed: Mapping[str, str], wanted: set[str]) -> dict[str, str]:
    """Texts that a run keeps, by their names in b: all of `wanted`, and others until `_MOST` characters are reached.

    Of the others, those in the top directories of `wanted` come first.

    Args:
        sources: of the run.
        renamed: names in this run to names in b, where they differ.
        wanted: names in b.
    """
    tops = {name.partition("/")[0] for name in wanted}
    by_name = {renamed.get(name, name): name for name in sources}
    texts: dict[str, str] = {}
    for name in sorted(by_name, key=lambda n: (n not in wanted, "/" in n and n.partition("/")[0] not in tops)):
        if name in wanted or sum(map(len, texts.values())) < _MOST:
            texts[name] = sources[by_name[name]].text
    return texts


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
        models=frozenset(_last_part(module.variable) for module in tree.values() if module.variable),
        optimizers=tuple(dict.fromkeys(name.partition("#")[0] for side in scene.steppers for name in side)),
        words=frozenset(word for word in words if len(word) > 1 and not _INDEX.fullmatch(word)),
        lines=(_parsed_lines(lines[0]), _parsed_lines(lines[1])),
        tensor=site.fqn.rpartition(".")[2],
        roots=tuple({module.module_class: 0 for name, module in tree.items() if "." not in name}),
        ran=frozenset(module.module_class for module in tree.values()),
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

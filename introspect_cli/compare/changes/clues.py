"""What is known of a divergence that a line of code can be held against: names, classes, lines on record."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.nearness import Clues
from introspect_cli.compare.endings import Raised, cut_short
from introspect_cli.compare.evidence import Known, Thing
from introspect_cli.compare.match.names import ancestors, owner_of
from introspect_cli.compare.reasons.beginning import MODES, differing_events, unseen_between
from introspect_cli.compare.reasons.gradient import Handling, excluded, stale_side
from introspect_cli.compare.reasons.module import other_class
from introspect_cli.compare.reasons.update import changes as optimizer_settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.records import ModuleInfo

_LINE = re.compile(r"(.+):(\d+)\Z")
_INDEX = re.compile(r"\d+")


def clues_of(scene: Scene) -> Clues:
    """What the records say of the first divergence."""
    cause, site = scene.cause, scene.site
    tree = scene.step.modules[0] | scene.step.modules[1]
    subject = cause.module or cause.subject or site.fqn
    around = owner_of(subject) if cause.reason == "structure" else subject
    replaced = other_class(scene, around) if cause.reason in {"structure", "own_code", "module"} else ()
    subject = around if replaced else subject
    names = [name for name in (subject, *ancestors(subject)) if name in tree]
    tuned = optimizer_settings(scene) if cause.reason == "optimizer" else scene.hyperparameters
    words = {word for label in tuned for word in (label.rpartition(".")[2], label.about)}
    for name in names[:1]:
        words |= _attributes_that_differ(scene.step.modules, name)
    if cause.reason in {"initial", "outside"}:
        words.add(site.fqn.rpartition(".")[2])
    if cause.subject:
        words.add(_last(cause.subject))
    words |= {*replaced}
    if scene.first.a is not None and scene.first.b is not None:
        dtypes = scene.first.a.layout.dtype, scene.first.b.layout.dtype
        words |= set(dtypes) | {"autocast", "to", "half", "float", "dtype"} if dtypes[0] != dtypes[1] else set()
    # all steps before agree: a condition on the number of this one is a hint
    late = {str(scene.first.step)} if scene.first.step > 1 and scene.steps_before else set()
    if scene.calls is not None and cause.reason in {"structure", "loss"}:
        few, many = sorted(scene.calls[1:])
        late |= {str(number) for number in (few, many, many // max(few, 1)) if number > 1}
    if cause.reason == "gradient":
        words |= _handling(scene)
    between: tuple[list[tuple[str, str]], ...] = [], []
    lines: list[list[str]] = [[scene.first.source if scene.first.a is not None else ""], []]
    ended = cut_short(scene)
    if ended is not None and ended.file:
        lines[ended.side == "b"].append(f"{ended.file}:{ended.line}")
    if cause.reason in {"rng", "initial", "structure", "batch"} and scene.is_first_step:
        filled = site.fqn if cause.reason == "initial" else ""
        between = unseen_between((scene.run_a, scene.run_b), scene.first.rank)
        began = differing_events((scene.run_a, scene.run_b), scene.first.rank, filled)
        for found, events in zip(lines, began, strict=True):
            # what a module draws tells nothing of why one run has no such module
            told = [event for event in events if cause.reason != "structure" or event.name == subject]
            found += [event.line for event in told]
            words |= {word for event in told for word in event.name.split(".")[-2:]}
            words |= {"train", "eval"} if any(event.by in MODES for event in told) else set()
    return Clues(
        reason="structure" if replaced else cause.instead or cause.reason,
        gap=cause.reason == "gap",
        classes=tuple(tree[name].module_class for name in names),
        attributes=tuple(_last(name) for name in names),
        after=_last(cause.after),
        before=_last(cause.before),
        models=frozenset(_last(module.variable) for module in tree.values() if module.variable),
        optimizers=tuple(dict.fromkeys(name.partition("#")[0] for side in scene.optimizers for name in side)),
        words=frozenset(word for word in words if len(word) > 1 and not _INDEX.fullmatch(word)) | late,
        lines=(_parsed(lines[0]), _parsed(lines[1])),
        spans=(_spans(between[0]), _spans(between[1])),
        kind=site.kind,
        tensor=site.fqn.rpartition(".")[2],
        roots=tuple({module.module_class: 0 for name, module in tree.items() if "." not in name}),
        at_start=scene.is_first_step,
        batch_is_equal=any(found.known is Known.EQUAL for found in cause.rests_on(Thing.BATCHES)),
    )


def _handling(scene: Scene) -> set[str]:
    """Names of what a script calls to do to gradients what the records leave possible."""
    if stale_side(scene.step, scene.position):
        return set(_HANDLING[Handling.ZERO_GRAD])
    gone = excluded(scene)
    found = {word for handling, words in _HANDLING.items() if handling not in gone for word in words}
    return found | ({"clip_grad_value_"} if Handling.CLIPPING in gone else set())


_HANDLING = {
    Handling.CLIPPING: (
        "clip_grad_norm_",
        "clip_grad_norm",
        "clip_grad_value_",
        "clip_gradients",
        "clip_grads_with_norm_",
    ),
    Handling.UNSCALING: ("unscale_",),
    Handling.ACCUMULATION: ("accumulate", "no_sync"),
    Handling.ZERO_GRAD: ("zero_grad", "set_to_none"),
}


def clues_of_ending(found: Raised) -> Clues:
    """What is known of a run that ended by an exception where the other went on."""
    line = ((found.file, found.line),) if found.file else ()
    return Clues("raised", lines=((), line) if found.side == "b" else (line, ()))


def _parsed(lines: Iterable[str]) -> tuple[tuple[str, int], ...]:
    return tuple((match[1], int(match[2])) for line in lines if (match := _LINE.fullmatch(line)))


def _spans(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, int, int], ...]:
    """Files with two lines each; what is in two files is in none."""
    found = [parsed for pair in pairs if len(parsed := _parsed(pair)) == 2]
    return tuple((file, first, last) for (file, first), (other, last) in found if file == other)


def _last(name: str) -> str:
    """What a module is called in the one around it: the last part of its name that is no number."""
    return next((part for part in reversed(name.split(".")) if not _INDEX.fullmatch(part)), "")


def _attributes_that_differ(trees: Iterable[dict[str, ModuleInfo]], name: str) -> set[str]:
    one, two = (dict(tree[name].attributes) if name in tree else {} for tree in trees)
    found = {key for key in one.keys() | two.keys() if one.get(key) != two.get(key)} if one and two else set()
    return found | {"train", "eval"} if "training" in found else found

"""What the changed statements mean for the settings that are told, and what is left where nothing changed."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.clues import Nearness
from introspect_cli.compare.evidence import RANDOM, Known

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.changes.clues import CodeChanges, Ranked
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.result import SettingChange

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
    if same - start > _SHOWN - _BEFORE // 2 and max(map(len, whole)) > _SHOWN:  # a long word before what differs
        start = same - _BEFORE
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

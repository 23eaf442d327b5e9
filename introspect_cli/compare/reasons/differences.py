"""What differs between the settings of two runs, with both values, and a change as words.

Flat mappings are compared directly; nested ones by deepdiff, imported only then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.command_line import argv_of, command_options
from introspect_cli.compare.reasons.beginning import DOCUMENT
from introspect_cli.compare.reasons.files import READ, file_changes
from introspect_cli.compare.reasons.hyperparameters import built_changes, optimizer_changes, unequal
from introspect_cli.compare.result import SettingChange
from introspect_cli.store.documents import gpu_names
from introspect_cli.store.manifests import rank_list

if TYPE_CHECKING:
    from introspect_cli.store.reader import Run

RUN_NOISE = re.compile(
    r"(^|[.\[' ])(time|started|ended|pid|uptime|load|hostname|output|cwd|tmp|temperature|free_?memory|boot)\b"
)
_ELSEWHERE = frozenset({DOCUMENT, "files", "operators"})
"""Documents that are no settings."""
_GIT = frozenset({"commit", "dirty"})

_SWITCHES = {
    "matmul_allow_tf32": "TF32 in matrix products",
    "cudnn_allow_tf32": "TF32 in cuDNN",
    "fp16_reduced_precision_reduction": "reduced precision in sums of float16 products",
    "bf16_reduced_precision_reduction": "reduced precision in sums of bfloat16 products",
    "fp16_accumulation": "accumulation in float16",
    "flash_sdp": "flash attention",
    "mem_efficient_sdp": "memory-efficient attention",
    "math_sdp": "attention by plain operators",
    "cudnn_sdp": "attention by cuDNN",
    "cudnn_enabled": "cuDNN",
    "cudnn_benchmark": "the benchmark that chooses cuDNN's kernels",
    "cudnn_deterministic": "determinism of cuDNN",
    "deterministic_algorithms": "torch.use_deterministic_algorithms",
}
"""Flags that are on or off, as a sentence calls them."""


_OF_A_GPU = frozenset({"cudnn", "nccl"})
"""Versions that a process knows once it uses a GPU: that one run alone has them says no more than that it did."""

_LONGEST = 80
_AROUND = 20


def on_one_line(one: Any, two: Any) -> tuple[str | None, str | None]:
    """A setting's two values on one line each, None for none; of long ones what is around the first difference."""
    a, b = (None if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in (one, two))
    if a is None or b is None:
        start = 0
    else:
        shared = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        start = max(shared - _AROUND, 0) if max(len(a), len(b)) > _LONGEST else 0
    return _cut(a, start), _cut(b, start)


def _cut(text: str | None, start: int) -> str | None:
    """A text from a place on, and no longer than a line has room for."""
    if text is None:
        return None
    rest = f"...{text[start:]}" if start else text
    return rest if len(rest) <= _LONGEST else rest[: _LONGEST - 3] + "..."


def _flat(value: Any) -> bool:
    return isinstance(value, Mapping) and not any(isinstance(item, (Mapping, list, tuple)) for item in value.values())


def _changes(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) for each difference; None on the side that lacks it."""
    if a == b:
        return
    if (_flat(a) or not a) and (_flat(b) or not b):
        a, b = a or {}, b or {}
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from ((str(name), one, two) for name, one, two in unequal(a, b))
            return
    yield from _nested(a, b)


def _nested(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Differences of nested values, as deepdiff finds them."""
    from deepdiff import DeepDiff

    delta = DeepDiff(a, b, view="tree", verbose_level=2, ignore_order=False)
    for kind in delta:
        for level in delta[kind]:
            name = re.sub(r"^root", "", level.path() or "")
            name = re.sub(r"\['([^'\]]*)'\]", r".\1", name).lstrip(".")
            values = None if "added" in kind else level.t1, None if "removed" in kind else level.t2
            yield name or "value", *values


def differences(a: Run, b: Run) -> Iterator[tuple[Any, ...]]:
    """(source, name, value in a, value in b) of all settings that differ, from two runs' settings and manifests."""
    settings_a, settings_b = ({n: run.settings[n] for n in run.settings if n not in _ELSEWHERE} for run in (a, b))
    words_a, words_b = argv_of(settings_a, a.manifest), argv_of(settings_b, b.manifest)
    same_name = words_a and words_b and PurePath(words_a[0]).name == PurePath(words_b[0]).name
    if same_name and "sources" in settings_a and "sources" in settings_b:
        words_b[0] = words_a[0]  # what the script holds is told by its hash; its folder explains nothing
    for name, one, two in _changes(command_options(words_a), command_options(words_b)):
        yield "command", name, one, two
    for source in dict.fromkeys([*settings_a, *settings_b]):
        if source == "command" or source not in settings_a or source not in settings_b:
            continue  # settings that one capture was told not to keep are no change
        one_side, other_side = settings_a[source], settings_b[source]
        if source == "built":
            yield from built_changes(one_side, other_side, _changes)
            continue
        changes = (optimizer_changes if source == "optimizers" else _changes)(one_side, other_side)
        for name, one, two in changes:
            if source == "sources":
                both = one is not None and two is not None
                yield source, name, *(("", "changed") if both else (one and "imported", two and "imported"))
            elif source == "hardware" and name == "gpus":
                yield source, "GPU", *(gpu_names(value) if value else "none used" for value in (one, two))
            elif source == "runtime" and name in _OF_A_GPU and None in (one, two):
                continue
            elif source != "git":
                yield source, name, one, two
            elif name in _GIT:
                yield source, name, *(value[:10] if isinstance(value, str) else value for value in (one, two))
    if all("files" in run.settings for run in (a, b)):
        for change in file_changes(a, b, _changes):
            yield "files", change, change.a, change.b
    given = [run.manifest.get("options") for run in (a, b)]
    options_a, options_b = (options if isinstance(options, Mapping) else {} for options in given)
    for name in ("seed", "deterministic", "compile", "perturb"):
        if options_a.get(name) != options_b.get(name):
            yield "options", f"--{name}", options_a.get(name), options_b.get(name)


_MOST_RANKS = 16
"""Ranks that are looked at: their settings are documents of their own. `check` holds all ranks of a run together."""


def _rank_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[SettingChange]:
    """What differs between the optimizers and the flags of one rank of two runs."""
    by_rank = []
    for source, changes in (("optimizers", optimizer_changes), ("runtime", _changes)):
        if source in a and source in b:
            of_source = ((name, *on_one_line(one, two)) for name, one, two in changes(a[source], b[source]))
            by_rank += [
                SettingChange(source, *change) for change in of_source if not RUN_NOISE.search(change[0].lower())
            ]
    return by_rank


def on_some_ranks(a: Run, b: Run) -> list[str]:
    """Sentences on optimizers and flags that differ on some ranks and not on the lowest, whose settings are the run's.

    Another rank's learning rate may have changed without a trace in any number, where gradients are zero or NaN: then
    nothing diverges, and nothing else would tell of it.
    """
    ranks = [rank for rank in a.recorded if rank in b.recorded][:_MOST_RANKS]
    if len(ranks) < 2:
        return []
    notes: dict[SettingChange, list[int]] = {}
    for rank in ranks:
        for change in _rank_changes(a.settings_of(rank), b.settings_of(rank)):
            notes.setdefault(change, []).append(rank)
    return [
        f"On {rank_list(these)} alone a setting differs: {describe(change)} ({change.source})."
        for change, these in notes.items()
        if ranks[0] not in these
    ]


def describe(change: SettingChange) -> str:
    """A change like a diff: `lr 0.0003 -> 0.001`, `model.py changed`, `--amp, set only in b`."""
    if change.source in {"sources", "files"} and change.a == "":
        return f"{change.name} {change.b}"
    switched = {"True": "a", "False": "b"}.get(str(change.a)) if {change.a, change.b} == {"True", "False"} else None
    if switched and change.source == "runtime" and change.name in _SWITCHES:
        return f"{_SWITCHES[change.name]} is on in {switched} only"
    only = ", set only in" if change.source in {"command", "environment", "options"} else " only in"
    name = "uncommitted changes" if (change.source, change.name) == ("git", "dirty") else change.name
    if change.a is None:
        tail = "" if change.b in {"given", "imported", READ, None} else f"{_sign(name)}{change.b}"
        return f"{name}{tail}{only} b"
    if change.b is None:
        tail = "" if change.a in {"given", "imported", READ} else f"{_sign(name)}{change.a}"
        return f"{name}{tail}{only} a"
    return f"{name} {change.a} -> {change.b}"


def _sign(name: str) -> str:
    return " " if name.startswith("-") else " = "

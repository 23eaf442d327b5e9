"""Hyper-parameters as recorded at a step, where the two runs differ."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from introspect_cli.compare.join.sites import KINDS, Alignment
from introspect_cli.records import SETTING_KINDS

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.step_view import StepRecords


def hyperparameter_changes(alignment: Alignment, step: StepRecords) -> dict[str, tuple[str | None, str | None]]:
    """Hyper-parameters that differ in a step: name to both values; equal changes of several groups are folded.

    All but the learning rate are recorded where they are new or have changed. What one run alone recorded here, and the
    other at another step, is not known to differ.
    """
    found: dict[tuple[str, str], dict[tuple[str | None, str | None], list[str]]] = {}
    groups: set[tuple[str, str]] = set()
    in_b = set(alignment.b_ids.tolist())
    for union in dict.fromkeys([*step.rows_a, *step.rows_b]):
        if KINDS[alignment.kind[union]] not in SETTING_KINDS:
            continue
        match = re.match(r"^\[(\d+)\](.*)$", alignment.path[union])
        group, rest = (match[1], match[2]) if match else ("", alignment.path[union])
        groups.add((alignment.fqn[union], group))
        if step.checksum(union, "a") == step.checksum(union, "b"):
            continue
        name = re.sub(r"^\.", "", re.sub(r"\['?([^'\]]*)'?\]", r".\1", rest))
        values = (step.plain(union, "a"), step.plain(union, "b"))
        elsewhere = union < len(alignment.a) and union in in_b
        if values[0] != values[1] and not (elsewhere and None in values):
            found.setdefault((alignment.fqn[union], name), {}).setdefault(values, []).append(group)
    named: dict[str, tuple[str | None, str | None]] = {}
    several = len({fqn for fqn, _ in groups}) > 1
    for (fqn, name), by_values in found.items():
        count = sum(1 for owner, _ in groups if owner == fqn)
        for values, own in by_values.items():
            label = f"{fqn} {name}" if several else name
            if len(own) < count:
                label += f" (group {', '.join(dict.fromkeys(own))})"
            named[label] = values
    if "lr" in named:
        named.pop("initial_lr", None)  # a scheduler's note of where lr began; it says nothing more
    return named

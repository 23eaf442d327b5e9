"""Groups of runs that agree, as lines and as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.compare.result import Verdict
from introspect_cli.records import clean, count
from introspect_cli.render.blocks import Block, Line, line
from introspect_cli.render.json import FORMAT

if TYPE_CHECKING:
    from introspect_cli.compare.groups import Groups

_STYLE = {Verdict.SAME: "good", Verdict.DIVERGED: "bad", Verdict.UNDECIDED: "unsure"}


def groups_blocks(found: Groups) -> list[Block]:
    """The sentence, and each group with how it differs from the largest."""
    blocks: list[Block] = [Line(((clean(found.sentence), _STYLE[found.verdict]),))]
    for number, group in enumerate(found.groups):
        blocks += [line(), line(f"Group {number + 1}, {count(len(group), 'run')}:", "heading")]
        blocks += [line(clean(path), indent=2) for path in group]
        if number:
            difference = found.differences[number - 1]
            blocks.append(line(f"against {clean(difference.a)}: {clean(difference.sentence)}", indent=2))
    return blocks


def groups_document(found: Groups) -> dict[str, Any]:
    """The same as plain nested data."""
    return {
        "format": FORMAT,
        "verdict": found.verdict.value,
        "sentence": found.sentence,
        "groups": [list(group) for group in found.groups],
        "differences": [{**vars(difference), "verdict": difference.verdict.value} for difference in found.differences],
    }

"""The findings of a check, and its rules, as lines."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from introspect_cli.health.findings import LEVELS, CheckResult, Finding, Level
from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Line, line
from introspect_cli.render.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.health.findings import Rule

_STYLE = {Level.ERROR: "bad", Level.WARNING: "unsure", Level.INFO: "dim"}
_SHOWN = 4
_NARROWEST = 40


def check_blocks(result: CheckResult) -> list[Block]:
    """The findings, worst first, and what could not be looked for."""
    blocks: list[Block] = []
    for finding in result.findings:
        blocks += _finding(finding, "" if result.checkpoint else f" from step {finding.step}")
        blocks.append(line())
    blocks.append(line(summary(result), "bad" if result.reaches(Level.WARNING) else "good"))
    blocks += [line(clean(note), "dim", 2) for note in result.notes]
    if result.unseen:
        needs: dict[str, list[str]] = {}
        for rule, need in result.unseen:
            needs.setdefault(need, []).append(rule)
        blocks.append(line(f"not checked, because the {'checkpoint' if result.checkpoint else 'run'} lacks:", "dim"))
        blocks += [line(f"{clean(need)}: {', '.join(rules)}", "dim", 2) for need, rules in needs.items()]
    return blocks


def summary(result: CheckResult) -> str:
    """One line: how many findings of each level, over how much."""
    counts = [
        count(number, level.value if level is not Level.INFO else "remark")
        for level in LEVELS
        if (number := sum(finding.level is level for finding in result.findings))
    ]
    what = ", ".join(counts) if counts else "nothing found"
    what += f" on {clean(result.only)}" if result.only else ""
    over = "the tensors" if result.checkpoint else count(result.steps, "step")
    return f"{what} ({count(len(result.checked), 'rule')} over {over} of {clean(result.run)})"


def _finding(finding: Finding, since: str) -> list[Block]:
    rank = f", rank {finding.rank}" if finding.rank else ""
    head = Line(
        (
            (f"{finding.level.value}: ", _STYLE[finding.level]),
            (f"{finding.rule}", "heading"),
            (f"{since}{rank}: ", ""),
            (clean(finding.site), "name"),
        )
    )
    blocks: list[Block] = [head, line(clean(finding.evidence), indent=2)]
    if finding.also:
        more = len(finding.also) - _SHOWN
        names = ", ".join(clean(name) for name in finding.also[:_SHOWN])
        blocks.append(line(f"also {names}{f' and {more} more' if more > 0 else ''}", indent=2))
    blocks.append(line(f"usually: {finding.cause}", "dim", 2))
    return blocks


def rules_blocks(rules: Sequence[Rule], width: int) -> list[Block]:
    """Each rule with its level, what it looks for and when that counts, folded at `width` as help is, in a pipe too."""
    blocks: list[Block] = []
    for rule in rules:
        blocks.append(Line(((rule.id, "name"), (f"  {rule.level.value}", _STYLE[rule.level])), wrap=False))
        for text, style in ((rule.about, ""), (f"when: {rule.when}", "dim")):
            folded = textwrap.wrap(text, max(width, _NARROWEST) - 4, break_long_words=False, break_on_hyphens=False)
            blocks += [line(part, style, 4 if number else 2, wrap=False) for number, part in enumerate(folded)]
    return blocks

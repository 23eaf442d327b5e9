"""What a check finds, its rules, and a run that goes on, on one screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.say import some
from introspect_cli.health.findings import LEVELS, CheckResult, Finding, Level, Rule
from introspect_cli.render.blocks import Block, Line, line
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Sequence


_STYLE = {Level.ERROR: "bad", Level.WARNING: "unsure", Level.INFO: "dim"}
_SHOWN = 4


def check_blocks(result: CheckResult) -> list[Block]:
    """The findings in their order, a summary, notes, and rules that could not be decided, by what the run lacks."""
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
    """A check's result in a line: `1 error, 2 warnings (30 rules over 20 steps of RUN)`."""
    counts = [
        count(number, level.value if level is not Level.INFO else "remark")
        for level in LEVELS
        if (number := sum(finding.level is level for finding in result.findings))
    ]
    what = ", ".join(counts) if counts else "nothing found"
    over = "the tensors" if result.checkpoint else count(result.steps, "step")
    return f"{what} ({count(len(result.checked), 'rule')} over {over} of {clean(result.run)})"


def _finding(finding: Finding, since: str) -> list[Block]:
    """A finding: level, rule, site (rank if not 0); its evidence; up to `_SHOWN` further sites; its cause.

    `since` is put after the rule: " from step 3", or "".
    """
    rank = f", rank {finding.rank}" if finding.rank else ""
    level, rule = (f"{finding.level.value}: ", _STYLE[finding.level]), (finding.rule, "heading")
    head = Line((level, rule, (f"{since}{rank}: ", ""), (clean(finding.site), "name")))
    blocks: list[Block] = [head, line(clean(finding.evidence), indent=2)]
    if finding.also:
        blocks.append(line(f"also {some([*map(clean, finding.also)], _SHOWN)}", indent=2))
    blocks.append(line(f"usually: {finding.cause}", "dim", 2))
    return blocks


def rules_blocks(rules: Sequence[Rule]) -> list[Block]:
    """Each rule with its level, what it looks for and when that counts, not its cause."""
    blocks: list[Block] = []
    for rule in rules:
        blocks.append(Line(((rule.id, "name"), (f"  {rule.level.value}", _STYLE[rule.level])), wrap=False))
        blocks += [line(rule.about, "", 2), line(f"when: {rule.when}", "dim", 2)]
    return blocks

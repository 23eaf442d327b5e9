"""What a check finds, its rules, and a run that goes on, on one screen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.compare.say import some
from introspect_cli.health.findings import LEVELS, CheckResult, Finding, Level, Rule
from introspect_cli.labels import step_words
from introspect_cli.render.blocks import Block, Line, line, number, rest_of
from introspect_cli.render.diff_text import VERDICT_STYLE
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.health.check import Look
    from introspect_cli.health.history import Curve


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


_CURVES = 4
_FINDINGS = 5


def watch_blocks(look: Look, against: tuple[str, DiffResult | None] | None = None) -> list[Block]:
    """The screen of a run in progress: curves, distance to another run, the first findings.

    Args:
        look: the run at this moment.
        against: name of the other run, and the comparison with it, None while nothing can be compared; None without
            one.
    """
    blocks: list[Block] = [Line(((clean(look.path), "heading"), (f"  {watch_line(look)}", "")))]
    blocks += [*map(_curve, look.curves[:_CURVES]), line()]
    if against is not None:
        blocks += _distance(look, *against)
    for finding in look.check.findings[:_FINDINGS]:
        blocks += _finding(finding, f" from step {finding.step}")[:2]
    blocks += rest_of(len(look.check.findings), _FINDINGS, "`introspect check` lists them")
    checked = summary(look.check) if look.check.checked else "no rule has the data it needs yet"
    return [*blocks, line(f"check: {checked}", "dim")]


def watch_line(look: Look) -> str:
    """How far a run is, in a line: `running, step 12`."""
    where = "no step yet" if look.last is None else step_words(look.last, look.labels)
    return f"{look.state.value}, {where}"


def _curve(curve: Curve) -> Line:
    """A line: a curve's last value and the range of its finite values."""
    values = curve.values.tolist()
    finite = [value for value in values if math.isfinite(value)]
    said = f"{number(values[-1]) if math.isfinite(values[-1]) else 'not finite'} at step {curve.steps[-1]}"
    said += f", {number(min(finite))} to {number(max(finite))}" if finite else ""
    return Line(((clean(curve.name), "heading"), (f"  {said}", "")))


def _distance(look: Look, name: str, result: DiffResult | None) -> list[Block]:
    """Two lines, the second empty: how the run compares with another one.

    The comparison's sentence if they diverge or the run is over; else how much agrees so far.

    Args:
        look: the run at this moment.
        name: of the other run.
        result: their comparison; None while nothing can be compared.
    """
    if result is None:
        return [line(f"against {clean(name)}: nothing to compare yet", "dim"), line()]
    counts, said = result.counts, result.sentence
    if result.verdict is not Verdict.DIVERGED and not look.over:
        within = f", {counts.within:,} of them within the tolerance" if counts.within else ""
        agree = f"{count(counts.equal, 'record')} of {count(counts.steps_compared, 'step')} agree{within}"
        said = f"no divergence so far: {agree}"
    return [line(f"against {clean(name)}: {clean(said)}", VERDICT_STYLE[result.verdict]), line()]

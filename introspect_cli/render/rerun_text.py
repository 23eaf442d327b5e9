"""What came of running scripts again, as lines and tables: the culprit of a bisection, a divergence seen closely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import Change, Nearness, Ranked
from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.render.blocks import Block, line, rest_of
from introspect_cli.render.diff_text import change_lines, diff_blocks, first_blocks
from introspect_cli.render.values_text import closeup_blocks
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from introspect_cli.compare.result import DiffResult
    from introspect_cli.rerun.bisect import Culprit
    from introspect_cli.rerun.changes.search import Proof
    from introspect_cli.rerun.zoom import Zoomed

_SHOWN = 6


def culprit_blocks(culprit: Culprit) -> list[Block]:
    """The first bad commit, its files, the changes in it that suffice, and its divergence; how many commits were tried.

    Where it is undecided, the commits that it could be.
    """
    tried = line(
        f"{count(len(culprit.tried), 'commit')} tried; their runs are in {clean(str(culprit.directory))}", "dim"
    )
    if culprit.commit is None:
        blocks: list[Block] = [line("Could not tell: only commits that cannot be captured are left.", "heading")]
        blocks += [line(f"could be {commit[:10]}", indent=2) for commit in culprit.candidates]
        return [*blocks, tried]
    blocks = [line(f"The first bad commit is {culprit.commit[:10]}: {clean(culprit.subject)}", "heading")]
    blocks += [line(clean(name), indent=2) for name in culprit.files]
    if culprit.proof is not None:
        blocks += [line(), *_proof_summary(culprit.proof)]
    blocks.append(line())
    if culprit.result is not None:
        blocks += _diverging(culprit.result) if culprit.proof is not None else first_blocks(culprit.result)
        blocks.append(line())
    return [*blocks, tried]


def _value(value: object) -> str:
    shown = (" ".join(value) or "given") if isinstance(value, list) else str(value)
    return "-" if value is None else clean(shown, 60)


def proof_blocks(proof: Proof) -> list[Block]:
    """The smallest set of changes, with both versions, and the divergence they cause.

    Then how many runs that took, and how many of them answered nothing.
    """
    blocks = _proof_summary(proof)
    if proof.result is not None:
        blocks += [line(), *_diverging(proof.result)]
    undecided = f", {proof.undecided} of them answered nothing" if proof.undecided else ""
    return [*blocks, line(f"{proof.runs} runs{undecided}, in {clean(str(proof.directory))}", "dim")]


def _diverging(result: DiffResult) -> list[Block]:
    """The sentence of the divergence that a proven cause makes, and the command that shows all of it."""
    again = f"introspect diff {result.a} {result.b} has the rest."
    return [line(clean(result.sentence, 1200)), line(clean(again, 1200), "dim", wrap=False)]


def _proof_summary(proof: Proof) -> list[Block]:
    """The sentence of a proof, the first `_SHOWN` of its changes, and what was not tried."""
    blocks: list[Block] = [line(f"{proof.sentence[:1].upper()}{proof.sentence[1:]}.", "heading")]
    for element in proof.elements[:_SHOWN]:
        if isinstance(element, Change):
            blocks += change_lines(Ranked(element, Nearness.ELSEWHERE))
        else:
            blocks.append(line(f"{clean(element.name)}: {_value(element.a)} -> {_value(element.b)}"))
    blocks += rest_of(len(proof.elements), _SHOWN)
    if proof.unknown:
        blocks += [line(), line(f"Not tried: {clean('; '.join(proof.unknown), 1200)}", "unsure")]
    return blocks


def zoom_blocks(zoomed: Zoomed) -> list[Block]:
    """The whole answer of a zoom: the sentence, whether runs repeat, closeups, and the new captures.

    The comparison from before alone where that does not diverge.
    """
    blocks: list[Block] = []
    if zoomed.before.verdict is not Verdict.DIVERGED:
        return diff_blocks(zoomed.before)
    shown = zoomed.before if zoomed.after is None or zoomed.after.first is None else zoomed.after
    blocks.append(line(clean(shown.sentence), "bad"))
    blocks += [line(clean(side.note, 1200), "" if side.repeats else "unsure") for side in zoomed.sides]
    if zoomed.after is not None and not zoomed.after.first:
        blocks.append(line(f"Run again, they do not diverge: {clean(zoomed.after.sentence)}", "unsure"))
    if zoomed.after is None or not zoomed.after.first:
        blocks.append(line("What follows is from the runs as they were recorded.", "unsure"))
    for closeup in zoomed.closeups:
        blocks += [line(), *closeup_blocks(closeup)]
    runs = " ".join(clean(str(side.run)) for side in zoomed.sides if side.run is not None)
    if runs:
        blocks += [line(), line(f"The new captures: {runs}", "dim", wrap=False)]
    return blocks

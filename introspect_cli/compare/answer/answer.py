"""The answer of a comparison: verdict, sentence, settings, changed source, findings and notes.

What is said of a divergence is in `diverged.py`, which is imported only where there is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.causes import clues_of_ending, code_changes, weighed_by_code
from introspect_cli.compare.answer.compared import (
    agreement,
    notes_on,
)
from introspect_cli.compare.answer.weights import Blame, setting_changes
from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.compare.say import head_of
from introspect_cli.compare.settings.settings import notes_on_some_ranks

if TYPE_CHECKING:
    from introspect_cli.compare.answer.compared import Compared


# --- the answer


def answer_for(compared: Compared, *, bitwise: bool) -> DiffResult:
    """The whole answer from all ranks' outcomes: verdict and sentence, settings, findings, notes and counts.

    Args:
        compared: both runs and what came of each rank.
        bitwise: whether all of both runs was compared without tolerance, so that results that agree are unchanged.
    """
    a, b, by_rank = compared.a, compared.b, compared.splits is None
    resumed = next((outcome.resumption for outcome in compared.outcomes if outcome.resumption is not None), None)
    notes = notes_on(compared, notes_on_some_ranks(a, b) if len(compared.outcomes) > 1 else [])
    answer = DiffResult(str(a.path), str(b.path), Verdict.DIVERGED, "", notes=tuple(dict.fromkeys(notes)))
    answer = replace(answer, counts=compared.counts, findings=() if resumed is None else (resumed,))
    if compared.diverges:
        from introspect_cli.compare.answer.diverged import diverged_answer

        return diverged_answer(
            replace(answer, findings=(*answer.findings, *(compared.structure() if by_rank else ()))),
            compared,
            compared.unchanged if by_rank and bitwise else "",
        )
    ending, offset = compared.ending, any(outcome.offset for outcome in compared.outcomes)
    code = code_changes(a, b, lambda: None if ending is None else clues_of_ending(ending))
    agree = agreement(compared)
    said = [agree.sentence, *([] if resumed is None else [head_of(resumed)])]
    # where no value differs, what differs in structure has changed nothing
    harmless = compared.best is None and agree.verdict is Verdict.SAME
    structure = compared.structure(same=harmless) if by_rank else ()
    return replace(
        answer,
        verdict=agree.verdict,
        sentence=" ".join(said if agree.verdict is Verdict.UNDECIDED else said[::-1]),
        settings=weighed_by_code(setting_changes(a, b, Blame(offset=offset)), code),
        findings=(*(() if code is None else (code,)), *answer.findings, *structure),
        training=agree.training,
        evaluation=agree.evaluation,
    )

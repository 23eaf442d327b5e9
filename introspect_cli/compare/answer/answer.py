"""The answer of a comparison: verdict, sentence, settings, changed source, findings and notes.

What is said of a divergence is in `diverged.py`, which is imported only where there is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.causes import clues_of_ending, code_changes
from introspect_cli.compare.answer.compared import agreement, exceptions_of, notes_on, raised_words, unseen_names
from introspect_cli.compare.answer.weights import Blame, setting_changes, weighed_by_code
from introspect_cli.compare.result import DiffResult, Separate, Verdict
from introspect_cli.compare.say import head_of, told
from introspect_cli.records import Phase

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
    notes, found = tuple(dict.fromkeys(filter(None, notes_on(compared)))), () if resumed is None else (resumed,)
    begins = "" if resumed is None else f"{head_of(resumed)} "
    answer = DiffResult(str(a.path), str(b.path), Verdict.DIVERGED, begins, notes=notes, counts=compared.counts)
    if compared.diverges:
        from introspect_cli.compare.answer.diverged import diverged_answer

        answer = replace(answer, findings=(*found, *(compared.structure() if by_rank else ())))
        return diverged_answer(answer, compared, compared.hidden if by_rank and bitwise else "")
    raised, offset = exceptions_of((a, b)), any(outcome.offset for outcome in compared.outcomes)
    code = code_changes(a, b, lambda: clues_of_ending(raised))
    verdict, text = agreement(compared)
    said = [text, raised_words(raised)]
    text = " ".join(filter(None, said[::-1] if verdict is Verdict.UNDECIDED else said))
    training, evaluation = Separate(verdict, text), None
    if any(outcome.evaluated for outcome in compared.outcomes):
        unseen = unseen_names(compared, Phase.EVAL)
        if unseen and verdict is Verdict.SAME:
            verdict, text = Verdict.UNDECIDED, told("evaluation-unseen", names=unseen, text=text)
        evaluation = Separate(verdict, text)
    # where no value differs, what differs in structure has changed nothing
    structure = compared.structure(same=compared.best is None and verdict is Verdict.SAME) if by_rank else ()
    return replace(
        answer,
        verdict=verdict,
        sentence=begins + text,
        settings=weighed_by_code(setting_changes(a, b, Blame(offset=offset)), code),
        findings=(*(() if code is None else (code,)), *found, *structure),
        training=training,
        evaluation=evaluation,
    )

"""The comparison of two runs: every rank compared, the first divergence explained, settings listed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.by_rank import compared_runs
from introspect_cli.compare.answer.causes import code_changes, ranked_code
from introspect_cli.compare.answer.compared import agreement, exceptions_of, notes_on, raised_words, unseen_names
from introspect_cli.compare.answer.weights import setting_changes, weighed_by_code
from introspect_cli.compare.names import renamer
from introspect_cli.compare.result import DiffResult, Separate, Verdict
from introspect_cli.compare.say import head_of, told
from introspect_cli.compare.watched import chooses_modules
from introspect_cli.errors import UsageError
from introspect_cli.records import Phase
from introspect_cli.selection import check_selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.store.run import Run
    from introspect_cli.store.tasks import Work


def compare_runs(
    a: Run, b: Run, options: DiffOptions, noise: Sequence[Run] = (), work: Work | None = None
) -> DiffResult:
    """Compare two opened runs, or two checkpoints.

    Args:
        a: the reference run.
        b: the run that should equal it.
        options: what counts.
        noise: runs that should equal a; differences as large as theirs are let pass.
        work: runs tasks in other processes, each of which compares some ranks or puts some steps together; None to do
            all of it here.

    Raises:
        StoreError: a store turns out to be damaged.
        UsageError: the options name nothing that these runs have, or a checkpoint is given with a run.
    """
    options = check_selection(options, (a, b), renamer(options.rename, {}))
    of_checkpoint = [isinstance(run.manifest.get("checkpoint"), dict) for run in (a, b)]
    asked, checkpoints = options, all(of_checkpoint)
    if any(of_checkpoint) and not checkpoints:
        raise UsageError("a checkpoint is compared with one run at a time: name these two, without --noise")
    if checkpoints:
        from introspect_cli.compare.checkpoints import checkpoint_options, of_checkpoints

        options = checkpoint_options(options, a, b)
    compared = compared_runs(a, b, options, noise, work)
    entire = not options.narrowed and not any(chooses_modules(run.manifest) for run in (a, b))
    answer = answer_for(compared, bitwise=entire and not options.tolerant and not noise)
    if checkpoints and compared.splits is None:
        return of_checkpoints(answer, (a, b), asked, compared.outcomes[0])
    return answer


def answer_for(compared: Compared, *, bitwise: bool) -> DiffResult:
    """The whole answer from all ranks' outcomes: verdict and sentence, settings, findings, notes and counts.

    Args:
        compared: both runs and what came of each rank.
        bitwise: whether all of both runs was compared without tolerance, so that results that agree are unchanged.
    """
    a, b, by_rank = compared.a, compared.b, compared.splits is None
    resumed = next((outcome.resumption for outcome in compared.outcomes if outcome.resumption is not None), None)
    notes, structure = tuple(dict.fromkeys(filter(None, notes_on(compared)))), compared.structure if by_rank else ()
    begins = "" if resumed is None else f"{head_of(resumed)} "
    answer = DiffResult(str(a.path), str(b.path), Verdict.DIVERGED, begins, notes=notes, counts=compared.counts)
    answer = replace(answer, structure=structure, resumed=resumed)
    if compared.diverges:
        from introspect_cli.compare.answer.diverged import diverged_answer

        return diverged_answer(answer, compared, compared.hidden if by_rank and bitwise else "")
    raised, offset = exceptions_of((a, b)), any(outcome.offset for outcome in compared.outcomes)
    code = ranked_code(code_changes(a, b), ending=next((each for each in raised[-1:] if each.side), None))
    verdict, text = agreement(compared)
    said = [text, raised_words(raised)]
    text = " ".join(filter(None, said[::-1] if verdict is Verdict.UNDECIDED else said))
    training, evaluation = Separate(verdict, text), None
    if any(True in outcome.parts for outcome in compared.outcomes):
        unseen = unseen_names(compared, Phase.EVAL)
        if unseen and verdict is Verdict.SAME:
            verdict, text = Verdict.UNDECIDED, told("evaluation-unseen", names=unseen, text=text)
        evaluation = Separate(verdict, text)
    answer = replace(answer, settings=weighed_by_code(setting_changes(a, b, offset=offset), code), code=code)
    return replace(answer, verdict=verdict, sentence=begins + text, training=training, evaluation=evaluation)

"""The comparison of two runs: every rank compared, the first divergence explained, settings listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.answer.answer import answer_for
from introspect_cli.compare.answer.by_rank import compared_runs
from introspect_cli.compare.match import are_ports
from introspect_cli.compare.names import renamer
from introspect_cli.compare.result import Verdict
from introspect_cli.compare.watched import chooses_modules, is_list
from introspect_cli.errors import UsageError
from introspect_cli.selection import check_selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.result import DiffOptions, DiffResult
    from introspect_cli.store.run import Run
    from introspect_cli.store.tasks import Work


def compare_runs(
    a: Run, b: Run, options: DiffOptions, noise: Sequence[Run] = (), work: Work | None = None
) -> DiffResult:
    """Compare two opened runs, or two checkpoints.

    Two implementations of one model under other names, of one rank each, are compared by the values they hold, if their
    comparison by name does not say "same". Not with `strict`, without `by_value`, or where anything was left out of the
    captures or of what was selected.

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
    # what is nowhere may have been left out, and of what was left out nothing is known
    entire = not options.narrowed and not any(chooses_modules(run.manifest) for run in (a, b))
    answer = answer_for(compared, bitwise=entire and not options.tolerant and not noise)
    outcomes, by_rank = compared.outcomes, compared.splits is None
    if checkpoints and by_rank:
        return of_checkpoints(answer, (a, b), asked, outcomes[0])
    by_value = by_rank and options.by_value and not options.strict and entire
    if not by_value or len(outcomes) != 1 or answer.verdict is Verdict.SAME:
        return answer
    one, two = (run.rank(outcomes[0].rank) for run in (a, b))
    if not are_ports(one, two, answer.first, listed=any(is_list(run.manifest) for run in (a, b))):
        return answer
    from introspect_cli.compare.answer.port_answer import port_answer, port_of  # only two programs of one model need it

    port = port_of(answer, (a, b), options, outcomes[0])
    return answer if port is None else port_answer(answer, port)

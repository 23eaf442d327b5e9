"""Groups of more than two runs that agree, and the step from which each group diverges from the largest.

A run is compared with the first run of each group, and joins the first group for which the answer is "same"; else it
begins a group. Under a tolerance, each run is within it of the group's first run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.compare.say import listed
from introspect_cli.errors import UsageError
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.store.run import Run
    from introspect_cli.store.tasks import Work


@dataclass(frozen=True)
class GroupDifference:
    """How a group differs from the largest.

    Attributes:
        a: a run of the largest group.
        b: a run of the other.
        verdict: diverged, or undecided where it could not be told.
        step: the step of the first divergence; None where undecided, and of checkpoints.
        sentence: the answer of their comparison.
    """

    a: str
    b: str
    verdict: Verdict
    step: int | None
    sentence: str


@dataclass(frozen=True)
class Groups:
    """Runs in groups with the same numbers.

    Attributes:
        verdict: same where all agree, diverged where any diverges, else undecided.
        sentence: the answer in plain words.
        groups: paths of runs, the largest group first.
        differences: for every group but the largest, how it differs from that.
    """

    verdict: Verdict
    sentence: str
    groups: tuple[tuple[str, ...], ...]
    differences: tuple[GroupDifference, ...]


def group_runs(
    runs: Sequence[Run], options: DiffOptions, noise: Sequence[Run] = (), work: Work | None = None
) -> Groups:
    """Put opened runs into groups: each joins the first group whose first run it compares as SAME with.

    The largest group comes first; of equally large ones, the one whose first run was named first.

    Args:
        runs: at least one, each once.
        options: what counts.
        noise: runs that should equal these, as `compare_runs` takes them.
        work: as `compare_runs` takes it.

    Raises:
        StoreError: a store turns out to be damaged.
        UsageError: a run is named twice, or the options mean nothing for these runs.
    """
    twice = next((path for path, times in Counter(str(run.path) for run in runs).items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} is named twice: give each run once.")
    groups: list[list[Run]] = []
    verdicts = set[Verdict]()

    @cache
    def compared(a: Run, b: Run) -> DiffResult:
        """The answer for two runs; each pair is compared once."""
        result = compare_runs(a, b, options, noise, work)
        verdicts.add(result.verdict)
        return result

    for run in runs:
        home: list[Run] = next((each for each in groups if compared(each[0], run).verdict is Verdict.SAME), [])
        groups += [] if home else [home]
        home.append(run)
    groups.sort(key=lambda group: -len(group))  # stable: of equal size, the one that was named first
    head, differences = groups[0][0], list[GroupDifference]()
    for group in groups[1:]:
        result = compared(head, group[0])
        step = result.first.step if result.first is not None and result.subject == "runs" else None
        verdict = Verdict.DIVERGED if result.verdict is Verdict.DIVERGED else Verdict.UNDECIDED
        differences.append(GroupDifference(str(head.path), str(group[0].path), verdict, step, result.sentence))
    worst = min((difference.verdict for difference in differences), default=Verdict.SAME)  # in the order of letters
    sizes = listed([count(len(group), "run") for group in groups])
    sentence = f"The {len(runs)} runs form {len(groups)} groups with the same numbers: {sizes}"
    sentence += ", as far as could be told." if Verdict.UNDECIDED in verdicts else "."
    if not differences:
        sentence = f"All {len(runs)} runs have the same numbers."
    elif [len(group) for group in groups] == [len(runs) - 1, 1] and len(runs) > 2 and worst is Verdict.DIVERGED:
        step = differences[0].step
        how = "differs" if step is None else f"diverges at step {step}"
        sentence = f"{groups[1][0].path} is the odd one out: it {how}; the other {len(runs) - 1} runs agree."
    named = tuple(tuple(str(run.path) for run in group) for group in groups)
    return Groups(worst, sentence, named, tuple(differences))

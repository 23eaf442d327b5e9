"""Groups of more than two runs that agree, and the step from which each group diverges from the largest.

A run is compared with the first run of each group, and joins the first group for which the answer is "same"; else it
begins a group. Under a tolerance, each run is within it of the group's first run.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    paths = [str(run.path) for run in runs]
    twice = next((path for place, path in enumerate(paths) if path in paths[:place]), None)
    if twice is not None:
        raise UsageError(f"{twice} is named twice: give each run once.")
    groups: list[list[Run]] = []
    results: dict[tuple[str, str], DiffResult] = {}

    def compared(a: Run, b: Run) -> DiffResult:
        """The answer for two runs; each pair is compared once."""
        key = str(a.path), str(b.path)
        if key not in results:
            results[key] = compare_runs(a, b, options, noise, work)
        return results[key]

    for run in runs:
        home = next((group for group in groups if compared(group[0], run).verdict is Verdict.SAME), None)
        if home is None:
            groups.append([run])
        else:
            home.append(run)
    groups.sort(key=lambda group: -len(group))  # stable: of equal size, the one that was named first
    head = groups[0][0]
    differences = []
    for group in groups[1:]:
        result = compared(head, group[0])
        step = result.first.step if result.first is not None and result.subject == "runs" else None
        verdict = Verdict.DIVERGED if result.verdict is Verdict.DIVERGED else Verdict.UNDECIDED
        differences.append(GroupDifference(str(head.path), str(group[0].path), verdict, step, result.sentence))
    named = tuple(tuple(str(run.path) for run in group) for group in groups)
    verdicts = {difference.verdict for difference in differences}
    worst = next((verdict for verdict in (Verdict.DIVERGED, Verdict.UNDECIDED) if verdict in verdicts), Verdict.SAME)
    decided = all(result.verdict is not Verdict.UNDECIDED for result in results.values())
    return Groups(worst, _sentence(named, differences, decided=decided), named, tuple(differences))


def _sentence(groups: Sequence[Sequence[str]], differences: Sequence[GroupDifference], *, decided: bool) -> str:
    """The answer in words.

    Args:
        groups: paths of runs, the largest group first.
        differences: of each other group, how it differs from the first.
        decided: False where the answer for any two runs was undecided.
    """
    total = sum(map(len, groups))
    if not differences:
        return f"All {total} runs have the same numbers."
    if len(groups) == 2 and len(groups[1]) == 1 and total > 2:
        odd, difference = groups[1][0], differences[0]
        if difference.verdict is Verdict.UNDECIDED:
            return f"{total - 1} of {total} runs have the same numbers; whether {odd} has them could not be told."
        how = "differs" if difference.step is None else f"diverges at step {difference.step}"
        return f"{odd} is the odd one out: it {how}; the other {total - 1} runs agree."
    if total == len(groups):
        none = f"None of the {total} runs is known to agree with another."
        return f"All {total} runs differ from each other." if decided else none
    sizes = listed([count(len(group), "run") for group in groups])
    return f"The {total} runs form {len(groups)} groups with the same numbers: {sizes}."

"""The collectives of ranks held against one another: which is missing, doubled, in another order, or not what it says.

All ranks of a group must call the same collectives in one order. Where they do not, the n-th of one rank meets the n-th
of another: shapes that differ hang or fail, equal ones silently add up what does not belong together. Lines of the
source tell that case.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.health.results import Call, wrong_result
from introspect_cli.records import Kind, clean, count
from introspect_cli.store.launched import IN_FLIGHT, group_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

_MOST = 1 << 22


@dataclass
class Collectives:
    """What was found.

    Attributes:
        seen: whether any rank recorded any.
        apart: for each group, the first step and rank at which ranks call different ones, and the sentence.
        wrong: results that are not what goes in makes: step, rank, group, sentence; the first of each group.
    """

    seen: bool = False
    apart: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    wrong: dict[str, tuple[int, int, str]] = field(default_factory=dict)


class CollectiveWalk:
    """Takes in steps, one after the other."""

    def __init__(self, readers: Sequence[RankReader]) -> None:
        """Start with the ranks' own readers."""
        self.found = Collectives()
        self._readers = list(readers)
        self._of: list[dict[int, tuple[str, int, str, str]]] = []
        for reader in readers:
            sites = reader.sites
            own = {}
            for number, kind in enumerate(sites.kind):
                if kind == Kind.COLLECTIVE.value:
                    own[number] = sites.fqn[number], int(sites.call[number]), sites.path[number], sites.source[number]
            self._of.append(own)
        self.found.seen = any(self._of)

    def step(self, step: int, batches: Sequence[StepBatch]) -> None:
        """Take in a step of all ranks."""
        if not self.found.seen:
            return
        by_group: dict[str, dict[int, dict[int, Call]]] = {}
        for at, batch in enumerate(batches):
            for (group, call), found in self.calls(at, batch).items():
                by_group.setdefault(group, {}).setdefault(at, {})[call] = found
        for group, ranks in by_group.items():
            if group.startswith("messages of"):
                continue
            sequences = {at: [own[call] for call in sorted(own)] for at, own in ranks.items()}
            told = compare({self._readers[at].rank: own for at, own in sequences.items()}, group, f"in step {step}")
            if told is not None:
                self.found.apart.setdefault(group, (step, *told))
            elif group not in self.found.wrong:
                self._results(step, batches, group, sequences)

    def calls(self, at: int, batch: StepBatch) -> dict[tuple[str, int], Call]:
        """The collectives of a rank in its step, by group and number; `at` is the rank's position."""
        found: dict[tuple[str, int], Call] = {}
        numbers = np.asarray(batch.site)
        for row in np.flatnonzero(np.isin(numbers, list(self._of[at]))).tolist():
            group, call, path, source = self._of[at][int(numbers[row])]
            known = found.get((group, call)) or Call("", source, {})
            _, dot, part = path.partition(".")
            if dot:
                known = known._replace(rows={**known.rows, f".{part}": row})
            else:
                known = known._replace(told=batch.text[row].strip("'\""))
            found[group, call] = known
        return found

    def _results(
        self, step: int, batches: Sequence[StepBatch], group: str, sequences: Mapping[int, Sequence[Call]]
    ) -> None:
        """Look at what comes out: whether it is what must come of what went in."""
        ranks = sorted(sequences)
        all_there = len(ranks) == group_size(group)
        for number in range(len(sequences[ranks[0]])):
            calls = {at: sequences[at][number] for at in ranks}
            told = wrong_result(self._readers, batches, calls, all_there=all_there)
            if told is not None:
                at, text = told
                sentence = f"collective {number} of {group} in step {step} ({calls[ranks[0]].where}): {text}"
                self.found.wrong.setdefault(group, (step, self._readers[at].rank, sentence))
                return


def compare(
    ranks: Mapping[int, Sequence[Call]], group: str, when: str, *, whole: bool = True
) -> tuple[int, str] | None:
    """The first collective of a group at which ranks part: the rank, and a sentence; None where they agree.

    Args:
        ranks: the calls of each, in order.
        group: what it is called.
        when: which step, in words.
        whole: whether these are all calls of the step, so that their number counts too.
    """
    base = min(ranks)
    for other in sorted(ranks):
        one, two = ranks[base], ranks[other]
        for number, (mine, theirs) in enumerate(zip(one, two, strict=False)):
            if mine.told != theirs.told:
                why = _moved(one, two, number)
            elif mine.source == theirs.source:
                continue
            elif not whole:
                why = ""
            elif _swapped(one, two, mine.source, theirs.source):
                why = ": they run in another order, and each meets another one"
            else:
                continue
            return other, (
                f"collective {number} of {group} {when} is {mine.where} on rank {base} and {theirs.where} on rank "
                f"{other}{why}"
            )
        if whole and len(one) != len(two):
            more, less, long = (base, other, one) if len(one) > len(two) else (other, base, two)
            number = _surplus(long, two if long is one else one)
            return other, (
                f"rank {more} has {count(len(long), 'collective')} of {group} {when} and rank {less} "
                f"{min(len(one), len(two))}: {long[number].where} is missing on rank {less}, or one too many on rank "
                f"{more}"
            )
    return None


def _surplus(long: Sequence[Call], short: Sequence[Call]) -> int:
    """Which call of the longer sequence the shorter one lacks: what follows it fits again; else the first beyond."""
    keys, wanted = [[(call.told, call.source) for call in own] for own in (long, short)]
    for number in range(len(long)):
        if len(long) == len(short) + 1 and keys[:number] + keys[number + 1 :] == wanted:
            return number
    return min(len(long), len(short))


def _swapped(one: Sequence[Call], two: Sequence[Call], mine: str, theirs: str) -> bool:
    """Whether both lines are run by both ranks as often; a branch by rank calls another line for good."""
    lines = [Counter(call.source for call in own) for own in (one, two)]
    return lines[0][mine] == lines[1][mine] > 0 and lines[0][theirs] == lines[1][theirs] > 0


def _moved(one: Sequence[Call], two: Sequence[Call], number: int) -> str:
    """Which of the two is out of place, where that can be told from what follows."""
    if number + 1 < len(one) and one[number + 1].told == two[number].told and len(one) > len(two):
        return ": the second lacks the first, or the first has one too many"
    if number + 1 < len(two) and two[number + 1].told == one[number].told and len(two) > len(one):
        return ": the first lacks the second, or the second has one too many"
    same = sorted(call.told for call in one) == sorted(call.told for call in two)
    return ": they run in another order" if same else ""


def under_way(readers: Sequence[RankReader]) -> list[tuple[int, int, str]]:
    """Where ranks part in the step that never ended: step, rank and sentence, of each group."""
    steps: dict[int, dict[str, dict[int, list[Call]]]] = {}
    noted: dict[int, int] = {}
    for reader in readers:
        for step, group, told, source in _noted(reader):
            steps.setdefault(step, {}).setdefault(group, {}).setdefault(reader.rank, []).append(Call(told, source, {}))
            noted[reader.rank] = max(step, noted.get(reader.rank, step))
    found = []
    for step, groups in sorted(steps.items()):
        for group, ranks in groups.items():
            if group.startswith("messages of") or len(ranks) < 2:
                continue
            parted = compare(ranks, group, f"in step {step}, which did not end,", whole=False)
            if parted is not None:
                found.append((step, *parted))
                continue
            ahead, behind = (pick(ranks, key=lambda rank: len(ranks[rank])) for pick in (max, min))
            number = len(ranks[behind])
            if len(ranks[ahead]) > number:
                evidence = (
                    f"rank {ahead} had begun collective {number} of {group} in step {step}, which did not end "
                    f"({ranks[ahead][number].where}), and rank {behind} had not: its last was "
                    f"{ranks[behind][-1].where}"
                )
                found.append((step, behind, evidence))
    return found


def _noted(reader: RankReader) -> list[tuple[int, str, str, str]]:
    """Lines of a rank's note on what began: step, group, what, source. Somebody else may have written it."""
    try:
        data = reader.beside(IN_FLIGHT, _MOST)
    except (StoreError, FileNotFoundError):
        return []
    found = []
    for line in data.decode("utf-8", "replace").splitlines():
        words = [clean(word, 300) for word in line.split("\t")]
        if len(words) == 5 and words[0].isascii() and words[0].isdigit() and len(words[0]) < 12:
            found.append((int(words[0]), words[1], words[3], words[4]))
    return found

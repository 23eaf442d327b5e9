"""The collectives of ranks held against one another: missing, doubled, or in another order.

All ranks of a group must call the same collectives in one order. Where they do not, the n-th of one rank meets the n-th
of another: shapes that differ hang or fail, equal ones silently add up what does not belong together. Lines of the
source tell that case.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.errors import StoreError
from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.findings import Hit, Level, require, rule
from introspect_cli.records import Kind
from introspect_cli.store.run_writer import IN_FLIGHT
from introspect_cli.texts import begin_alike, clean, count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from introspect_cli.store.reader import RankReader

_MOST = 1 << 22


class Call(NamedTuple):
    """One collective of one rank.

    Attributes:
        what: the operation with dtype and shapes, as `all_reduce sum of float32 [4]`.
        source: `file:line`.
    """

    what: str
    source: str

    @property
    def where(self) -> str:
        """The operation and its line, for a sentence: `all_reduce sum of float32 [4] at train.py:41`."""
        return f"{self.what} at {self.source}" if self.source else self.what


_MESSAGES = "messages of"
"""How groups begin whose calls are sends and recvs between two ranks, which need not come in one order."""


@dataclass
class Collectives(Gathered):
    """Collectives of all ranks, compared step by step.

    Attributes:
        mismatched: the first that ranks call differently, by group.
    """

    mismatched: dict[str, Hit] = field(default_factory=dict)

    def step(self, now: AlignedStep) -> None:
        """Compare the collectives of a step between the ranks of each group.

        Adds to `mismatched` a group's first mismatch; later ones of that group are dropped. Sends and receives between
        two ranks are not compared.
        """
        by_group: dict[str, dict[int, list[Call]]] = {}
        for number in sorted(now.of(Kind.COLLECTIVE), key=lambda number: now.sites[number].call):
            site = now.sites[number]
            compared = "." not in site.path and not site.fqn.startswith(_MESSAGES)  # a path names what goes in, or out
            for rank, row in now.rows[number].items() if compared else ():
                source = self.ranks.readers[rank].sites.source[int(now.batches[rank].site[row])]
                call = Call(now.text(rank, row).strip("'\""), source)
                by_group.setdefault(site.fqn, {}).setdefault(rank, []).append(call)
        for group, sequences in by_group.items():
            mismatch = compare(sequences, group, f"in step {now.step}")
            if mismatch is not None:
                self.mismatched.setdefault(group, Hit(now.step, group, *mismatch))


def compare(
    ranks: Mapping[int, Sequence[Call]], group: str, when: str, *, whole: bool = True
) -> tuple[str, int] | None:
    """(sentence, rank) for the lowest rank whose calls of a group are not those of the lowest rank of all.

    They may differ in operation, dtype or shape, in the source line, or in number.

    Args:
        ranks: calls of each rank, in order.
        group: its name, for the sentence.
        when: the step, in words.
        whole: whether the step ended. If so, the number of calls counts, and of equal operations another source line
            counts only where both ranks ran both lines equally often. If not, the number does not count, and another
            source line always does.

    Returns:
        None where all ranks agree.
    """
    base = min(ranks)
    for other in sorted(ranks):
        one, two = ranks[base], ranks[other]
        lines = [Counter(call.source for call in calls) for calls in (one, two)]
        for number, (first, second) in enumerate(zip(one, two, strict=False)):
            # of a swap, both ranks run both lines as often; a branch by rank calls another line for good
            swapped = all(lines[0][call.source] == lines[1][call.source] > 0 for call in (first, second))
            if first.what == second.what and (first.source == second.source or (whole and not swapped)):
                continue
            evidence = f"{first.where} on rank {base} and {second.where} on rank {other}"
            return f"collective {number} of {group} {when} is {evidence}", other
        if whole and len(one) != len(two):
            more, less, long, short = (base, other, one, two) if len(one) > len(two) else (other, base, two, one)
            surplus = long[begin_alike(long, short)].where
            evidence = f"{surplus} is missing on rank {less}, or one too many on rank {more}"
            counts = f"rank {more} has {count(len(long), 'collective')} of {group} {when} and rank {less} {len(short)}"
            return f"{counts}: {evidence}", other
    return None


def _find_under_way(readers: Sequence[RankReader]) -> list[Hit]:
    """At most one hit for each unended step and group: ranks began different collectives, or one rank began more.

    Reads what each rank noted of collectives it began. Messages between two ranks, and groups that one rank alone
    noted, are left out.
    """
    begun: dict[tuple[int, str], dict[int, list[Call]]] = {}
    for reader in readers:
        for step, group, call in _read_begun(reader):
            begun.setdefault((step, group), {}).setdefault(reader.rank, []).append(call)
    hits = []
    for (step, group), ranks in sorted(begun.items(), key=lambda item: item[0][0]):
        ahead, behind = (pick(ranks, key=lambda rank: len(ranks[rank])) for pick in (max, min))
        number = len(ranks[behind])
        mismatch = compare(ranks, group, f"in step {step}, which did not end,", whole=False)
        if mismatch is None and len(ranks[ahead]) > number:
            evidence = (
                f"rank {ahead} had begun collective {number} of {group} in step {step}, which did not end "
                f"({ranks[ahead][number].where}), and rank {behind} had not: its last was {ranks[behind][-1].where}"
            )
            mismatch = evidence, behind
        if mismatch is not None:
            hits.append(Hit(step, "under way", *mismatch))
    return hits


def _read_begun(reader: RankReader) -> Iterator[tuple[int, str, Call]]:
    """Read (step, group, call) of each collective that a rank noted as begun, in the file's order; no messages.

    None where the file is missing or cannot be read; malformed lines are skipped, since the file may be a stranger's.
    """
    try:
        data = reader.read_file(IN_FLIGHT, _MOST)
    except (StoreError, FileNotFoundError):
        return
    for line in data.decode("utf-8", "replace").splitlines():
        words = [clean(word, 300) for word in line.split("\t")]
        if len(words) == 5 and re.fullmatch("[0-9]{1,11}", words[0]) and not words[1].startswith(_MESSAGES):
            yield int(words[0]), words[1], Call(words[3], words[4])


@rule(Level.ERROR, over_ranks=True)
def collectives(ranks: Ranks) -> Iterator[Hit]:
    """A collective is missing, doubled, mismatched or in another order on a rank.

    When: seen with --record default,collective, in a hang too
    Cause: a call that only some ranks make, a loop of another length, an order that depends on the rank
    """
    under_way = _find_under_way(list(ranks.readers.values()))
    seen = any(site.kind == Kind.COLLECTIVE for site in ranks.sites)
    require(seen or under_way, "collectives (capture --record default,collective)")
    yield from (*ranks.of(Collectives).mismatched.values(), *under_way)

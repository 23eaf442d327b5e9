"""What ranks exchange: calls of collectives, what comes out of them, and messages between two ranks.

A result is held against what the ranks put in. A sum can be checked where sketches add up, a gather or a broadcast by
checksums, extrema bit by bit. Where values are only moved about (`all_to_all`) or cut after they were added
(`reduce_scatter`), their totals must stay. What was not recorded on every rank of the group proves nothing.

Messages of a pair arrive in the order in which they were sent, so the n-th send belongs to the n-th recv. Ranks may end
their steps before or after a message, and a schedule may send one ahead; but how far one is ahead of the other at the
end of a step does not change in a sound run.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.health.findings import Hit
from introspect_cli.records import Status
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from introspect_cli.health.aligned import AlignedStep, Value

_NEAR, _COARSE_NEAR = 1e-3, 5e-2
_COARSE = ("bfloat16", "float16", "float8")


class Call(NamedTuple):
    """One collective of one rank.

    Attributes:
        what: the operation with dtype and shapes, as `all_reduce sum of float32 [4]`.
        source: `file:line`.
        rows: rows of what goes in and comes out, by path.
        sequence: when in the step it was recorded.
    """

    what: str
    source: str
    rows: Mapping[str, int]
    sequence: int = 0

    @property
    def where(self) -> str:
        """It and its line."""
        return f"{self.what} at {self.source}" if self.source else self.what

    @property
    def operation(self) -> str:
        """`all_reduce`."""
        return self.what.split(" ", 1)[0]


def wrong_result(now: AlignedStep, calls: Mapping[int, Call], *, complete: bool) -> tuple[int, str] | None:
    """A rank and what is wrong with its result; None where nothing is, or that cannot be decided."""
    what = calls[min(calls)].what
    operation, how = [*what.split(), "", ""][:2]
    given, gives = (_values(now, calls, side) for side in (".in", ".out"))
    if not gives:
        return None
    if operation in ("all_reduce", "broadcast"):
        unlike = _unlike(gives)
        if unlike is not None:
            return unlike
    if not complete or not given:
        return None
    near = _COARSE_NEAR if any(name in what for name in _COARSE) else _NEAR
    expected = ""
    if operation == "all_reduce":
        expected = _reduced(given, gives, how, near)
    elif operation == "broadcast":
        expected = "" if {one.checksum for one in gives} == {one.checksum for one in given} else "what the root sent"
    elif operation in ("all_gather", "gather", "scatter", "all_to_all"):
        put = "put together" if "gather" in operation else "shared out"
        expected = "" if _only_moved(given, gives, operation, near) else f"what went in, {put}"
    elif operation == "reduce_scatter" and how in ("sum", "avg"):
        factor = 1 / len(calls) if how == "avg" else 1.0
        expected = "" if _add_up(given, gives, near, factor) else f"the {_mean(how)} of what went in, cut into parts"
    return (gives[0].rank, f"its result is not {expected}") if expected else None


def _values(now: AlignedStep, calls: Mapping[int, Call], side: str) -> list[Value]:
    """What all ranks put in, or got; nothing where any of it was not recorded whole."""
    values = []
    for rank in sorted(calls):
        rows = {path: row for path, row in calls[rank].rows.items() if path.startswith(side)}
        for path in sorted(rows, key=lambda path: (len(path), path)):
            if now.batches[rank].status[rows[path]] != Status.OBSERVED.value:
                return []
            values.append(now.value(rank, rows[path]))
    return values


def _by_rank(values: Sequence[Value]) -> dict[int, list[Value]]:
    by_rank: dict[int, list[Value]] = {}
    for value in values:
        by_rank.setdefault(value.rank, []).append(value)
    return by_rank


def _unlike(gives: Sequence[Value]) -> tuple[int, str] | None:
    """Ranks with another result than the first; results of several tensors are compared by their order."""
    results = {rank: [value.checksum for value in values] for rank, values in _by_rank(gives).items()}
    base = min(results)
    others = [rank for rank in sorted(results) if results[rank] != results[base]]
    if not others or len({len(result) for result in results.values()}) > 1:
        return None
    return others[0], f"its result on {rank_list(others)} is not that on rank {base}"


def _reduced(given: Sequence[Value], gives: Sequence[Value], how: str, near: float) -> str:
    """What the result of a reduction is not; "" where it is, or that cannot be decided."""
    each, rest = divmod(len(given), len(_by_rank(given)))
    if rest or len(gives) != len(given):
        return ""
    for number in range(each):
        terms, out = given[number::each], gives[number]
        if how in ("max", "min"):
            wanted, got = (
                (max(term.high for term in terms), out.high)
                if how == "max"
                else (min(term.low for term in terms), out.low)
            )
            if np.isfinite(wanted) and got != wanted:
                return f"the {how}imum of what went in"
        elif how == "product" and out.numel == 1:
            wanted = float(np.prod([term.mean for term in terms]))
            if np.isfinite(wanted) and abs(out.mean - wanted) > near * abs(wanted):
                return "the product of what went in"
        elif how in ("sum", "avg") and out.sketch is not None:
            sketches = [term.sketch for term in terms if term.sketch is not None]
            total = np.sum(sketches, axis=0) / (len(terms) if how == "avg" else 1)
            size = max(float(np.linalg.norm(sketch)) for sketch in (*sketches, out.sketch))
            far = float(np.linalg.norm(out.sketch - total)) / size if size else 0.0
            if np.isfinite(far) and far > near:
                return f"the {_mean(how)} of what went in (relative L2 {far:.1e})"
    return ""


def _only_moved(given: Sequence[Value], gives: Sequence[Value], operation: str, near: float) -> bool:
    """Whether what comes out is what went in, as far as that can be decided."""
    sent = Counter(value.checksum for value in given)
    if operation == "all_gather":
        return all(
            Counter(value.checksum for value in results) == sent
            if len(results) == len(given)
            else _add_up(given, results, near, exact=True)
            for results in _by_rank(gives).values()
        )
    if len(gives) == len(given) and operation in ("gather", "scatter"):
        return Counter(value.checksum for value in gives) == sent
    return _add_up(given, gives, near, exact=True)


def _add_up(
    given: Sequence[Value], gives: Sequence[Value], near: float, factor: float = 1.0, *, exact: bool = False
) -> bool:
    """Whether all elements that come out add up to those that went in; `exact`: with their number and extrema."""
    one, two = ([value for value in side if value.numel] for side in (given, gives))
    if not one or not two:
        return True
    if exact and sum(value.numel for value in one) != sum(value.numel for value in two):
        return True  # padded, or coalesced otherwise than was recorded
    totals = [sum(value.total for value in side) for side in (one, two)]
    size = max(sum(value.size for value in one) * factor, sum(value.size for value in two))
    if not np.isfinite([*totals, size]).all():
        return True
    extrema = [(min(value.low for value in side), max(value.high for value in side)) for side in (one, two)]
    return abs(totals[0] * factor - totals[1]) <= near * size and (not exact or extrema[0] == extrema[1])


def _mean(how: str) -> str:
    return "sum" if how == "sum" else "mean"


# --- messages


_MESSAGE = re.compile(r"(?:send to|(recv from)) rank (\d+) of (\w+) (\[[\d, ]*\])")


def is_message(group: str) -> bool:
    """Whether a group's calls are sends and recvs between two ranks, which need not come in one order."""
    return group.startswith("messages of")


class _Message(NamedTuple):
    """One end of a message: the dtype and number of elements that it carries, and the call in words."""

    size: tuple[str, int]
    where: str


class _Pair:
    """What one rank sends to another.

    Attributes:
        sent, received: sends and recvs that have no partner yet.
        ahead: by how many messages the sender was ahead at the end of the first step.
        missing: the message since which that is another number.
        unlike: the first message that is sent as one thing and received as another.
    """

    def __init__(self, name: str, sender: int, receiver: int) -> None:
        self.site, self.sender, self.receiver = f"{name}, {sender} to {receiver}", sender, receiver
        self.sent: deque[_Message] = deque()
        self.received: deque[_Message] = deque()
        self.ahead: int | None = None
        self.missing: Hit | None = None
        self.unlike: Hit | None = None

    def step(self, step: int, sent: Sequence[_Message], received: Sequence[_Message]) -> None:
        """Put the messages of a step beside those that wait for a partner."""
        self.sent += sent
        self.received += received
        while self.sent and self.received:
            one, two = self.sent.popleft(), self.received.popleft()
            if self.unlike is None and self.missing is None and one.size != two.size:
                evidence = (
                    f"{one.where} on rank {self.sender} meets {two.where} on rank {self.receiver} in step {step}: "
                    "another dtype or size"
                )
                self.unlike = Hit(step, self.site, evidence, self.receiver)
        ahead = len(self.sent) - len(self.received)
        if self.ahead is None:
            self.ahead = ahead
        if ahead == self.ahead:
            self.missing = None
        elif self.missing is None:
            last = [ends[-1].where if ends else "" for ends in (sent, received)]
            evidence = (
                f"in step {step} rank {self.sender} sends {count(len(sent), 'message')} to rank {self.receiver}, which "
                f"receives {len(received)}: {last[ahead < self.ahead] or last[ahead > self.ahead]} has no partner"
            )
            self.missing = Hit(step, self.site, evidence, self.receiver)


class Messages:
    """The messages between all pairs of ranks."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self._pairs: dict[tuple[str, int, int], _Pair] = {}
        self._last: int | None = None
        self._whole = True

    def step(self, step: int, calls: Mapping[int, Mapping[tuple[str, int], Call]]) -> None:
        """Take in the calls of all ranks; what is between steps that were left out is not known."""
        self._whole &= self._last is None or step == self._last + 1
        self._last = step
        if not self._whole:
            return
        ends: dict[tuple[str, int, int], tuple[list[_Message], list[_Message]]] = {}
        for rank, by_group in calls.items():
            messages = [(call.sequence, group, call) for (group, _), call in by_group.items() if is_message(group)]
            for _, group, call in sorted(messages, key=lambda item: item[0]):
                match = _MESSAGE.match(call.what)
                if match is None or int(match[2]) not in calls:
                    continue
                receives = match[1] is not None
                other = int(match[2])
                key = (group, other, rank) if receives else (group, rank, other)
                size = match[3], math.prod(int(size) for size in re.findall(r"\d+", match[4]))
                ends.setdefault(key, ([], []))[receives].append(_Message(size, f"{match[0]} at {call.source}"))
        for key in ends:
            self._pairs.setdefault(key, _Pair(*key))
        for key, pair in self._pairs.items():
            pair.step(step, *ends.get(key, ([], [])))

    def wrong(self) -> Iterator[Hit]:
        """The first that is wrong between each pair."""
        for pair in self._pairs.values():
            hits = [hit for hit in (pair.unlike, pair.missing) if hit is not None]
            if hits:
                yield min(hits, key=lambda hit: (hit.step, hit.evidence))

"""Messages between two ranks held against one another: a send without its recv, or one that takes something else.

Messages of a pair arrive in the order in which they were sent, so the n-th send belongs to the n-th recv. Ranks may end
their steps before or after a message, and a schedule may send one ahead; but how far one is ahead of the other at the
end of a step does not change in a sound run.
"""

from __future__ import annotations

import math
import re
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.health.findings import Hit
from introspect_cli.records import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from introspect_cli.health.results import Call

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

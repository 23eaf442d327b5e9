"""What sets the state of a default generator, in any step: it is seeded, or gets back a state that was kept.

A state that was set looks like one that was drawn from. So each function of a module that sets one is watched for as
long as a capture lasts. Until the first step, what happens goes among what seeds and draws there; after that it is
counted, by function and line. What checkpointing keeps and gives back is passed over: it leaves no trace.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from introspect_cli.capture.frames import Places
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.beginning import seed_word
from introspect_cli.records import Kind
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.capture.probes.beginning import BeginningProbe

MAX_PLACES = 200
_CHECKPOINTING, _BETWEEN = "torch.utils.checkpoint", 4


class _Where(NamedTuple):
    """Place where a state is set: `in` a step or `before` it, function, line of the script (`-` for none)."""

    stage: str
    by: str
    line: str


class SeedingProbe(GuardedProbe):
    """Records calls that seed a default generator or set its state."""

    name = "seedings"
    lost = "what sets random states is"
    kind = Kind.RNG

    def __init__(self, context: Context, beginning: BeginningProbe) -> None:
        """Watch nothing before `install`; `beginning` takes what happens before the first step."""
        super().__init__(context, then=self.remove)
        self._beginning = beginning
        self._places = Places()
        self._times: dict[_Where, list[Any]] = {}

    def document(self) -> dict[str, object]:
        """The document `settings/seedings`, a line for each place: `in 3 9 4 torch.manual_seed 17 train.py:12`.

        That is: within or before a step, the first and last such step, number of calls, the function, the seed or a
        digest of the state at the first call, and the line. Places are in the order of their first calls.
        """
        return {"set": [f"{w.stage} {a} {b} {n} {w.by} {of} {w.line}" for w, (a, b, n, of) in self._times.items()]}

    def _watch_setting(self, call: Call) -> Callable[[object], None]:
        """Called before a generator is seeded or set: notes draws so far; returns what notes the call afterwards.

        Before the first step the call is an event of `BeginningProbe`; later it is counted by place, unless
        `torch.utils.checkpoint` makes it.
        """
        is_early = self._beginning.note_draws_before_seeding(call.frame)

        def was_set(_: object) -> None:
            """Note the call as an early event, or count it; nothing for one of checkpointing in a step."""
            label, line = call.function, self._places.line(call.frame) or "-"
            if is_early:
                self._beginning.note_seeding(label, _seed_or_digest(label, call.first), line)
            elif not _is_checkpointing(call.frame):
                self._count(label, call.first, line)

        return was_set

    def _count(self, label: str, value: object, line: str) -> None:
        """Count a call at its place, and have the document written where the count is a power of 2.

        Once there are 200 places, calls at others are not counted.

        Args:
            label: the function.
            value: the seed or state that it was given.
            line: of the script; `-` for none.
        """
        step = self._recorder.step
        where = _Where("in" if self._context.clock.begun else "before", label, line)
        times = self._times.get(where)
        if times is not None:
            times[1:3] = step, times[2] + 1
        elif len(self._times) < MAX_PLACES:
            times = self._times[where] = [step, step, 1, _seed_or_digest(label, value)]
        # written again where it is new, and where the number has doubled
        if times is not None and times[2] & (times[2] - 1) == 0:
            self._context.facts["seedings"] = self.document


def _is_checkpointing(frame: FrameType) -> bool:
    """Whether a frame or any of its 3 nearest callers runs `torch.utils.checkpoint`."""
    there: FrameType | None = frame
    for _ in range(_BETWEEN):  # its function, or `fork_rng` and what leaves that
        if there is None:
            return False
        if there.f_globals.get("__name__") == _CHECKPOINTING:
            return True
        there = there.f_back
    return False


def _seed_or_digest(label: str, value: object) -> object:
    """`seed_word` of a value if `label` ends with `seed` or `seed_all`; else `#` and 16 hex digits of its digest."""
    if label.endswith(("seed", "seed_all")):
        return seed_word(value)
    if isinstance(value, torch.Tensor):
        with unobserved():
            data = value.cpu().numpy().tobytes()
    else:
        data = repr(value).encode()
    return f"#{blake2b(data, digest_size=8).hexdigest()}"

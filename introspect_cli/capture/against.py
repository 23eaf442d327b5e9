"""A run that is compared with another while it is written: what the script's process has of it.

That is one descriptor, which is looked at when a step ends. The comparison is another process's: a reference that
cannot be read, or takes long to read, costs its answer and nothing else.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.beside import PATIENCE, Beside
from introspect_cli.errors import UsageError
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED
from introspect_cli.records import count

if TYPE_CHECKING:
    from introspect_cli.capture.options import CaptureOptions

LATE = 10.0
"""Seconds that a comparison may be behind training before that is said."""

_CODES = {"same": SAME, "diverged": DIVERGED, "undecided": UNDECIDED}


def located(options: CaptureOptions) -> dict[str, Any]:
    """The runs that a capture is compared with, by paths that hold wherever the script goes.

    Raises:
        UsageError: there is none at such a path, or it would be written over.
    """
    against = None if options.against is None else _located(options.against)
    if (
        against is not None
        and options.output is not None
        and os.path.realpath(options.output) == os.path.realpath(against)
    ):
        raise UsageError(f"{options.against} is the run to compare with: name another directory with -o")
    return {
        "against": against,
        "noise": tuple(map(_located, options.noise)),
    }


def _located(run: str) -> str:
    from introspect_cli.store.objects import is_remote
    from introspect_cli.store.pack import from_anywhere

    if not is_remote(run) and not Path(run).exists():
        raise UsageError(f"there is no run at {run} to compare with")
    return from_anywhere(run)


class Against:
    """A process that compares a run with a reference.

    Attributes:
        reference: as messages call it.
        first: the step at which the runs diverge, None where it is not one step's; None while they do not.
        agreed: the last step up to which they were seen not to diverge, -1 before there is one.
        code: the exit status of `diff`, once it is known.
    """

    def __init__(self, run: Path, options: CaptureOptions) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        assert options.against is not None
        near = os.path.relpath(options.against) if os.path.isabs(options.against) else options.against  # noqa: PTH117 - text
        self.reference = options.against if near.startswith(os.pardir) else near
        self.first: tuple[int | None] | None = None
        self.agreed = -1
        self.code: int | None = None
        self._place: list[Any] | None = None
        self._ended = -1
        self._mark: tuple[int, float] | None = None
        self._patience = LATE
        self._rest = b""
        noise = [word for run in options.noise for word in ("--noise", run)]
        question = {
            "reference": options.against,
            "run": str(run),
            "asked": [
                *(["--rtol", str(options.rtol)] if options.rtol else []),
                *noise,
                *shlex.split(options.diff or ""),
            ],
            "command": options.on_divergence,
        }
        module = "introspect_cli.commands.alongside"
        self._command = options.on_divergence
        self._beside = Beside(module, [json.dumps(question)], "what compares", errors=False)

    def look(self, ended: int) -> list[str]:
        """What is to be said now, when a step has ended."""
        self._ended = ended
        data = self._beside.read()
        said = self._take(data) if data else []
        return said if said or self.first is not None or self.code is not None else self._late()

    def _late(self) -> list[str]:
        """How far the comparison is behind, once that is long, and again whenever it is twice as long."""
        now = time.monotonic()
        if self._mark is None or self.agreed >= self._mark[0]:  # it has seen what was the last step then
            self._mark = self._ended, now
        behind = now - self._mark[1]
        if behind < self._patience:
            return []
        self._patience = 2 * behind
        steps = count(self._ended - self.agreed, "step")
        return [f"the comparison with {self.reference} is {steps} ({behind:.0f} seconds) behind; training goes on"]

    def finish(self, patience: float = PATIENCE) -> list[str]:
        """Wait for the verdict, for a while; what is to be said of it."""
        data, ended = self._beside.rest(patience)
        said = self._take(data)
        if self.code is None:
            why = "what compares has ended early" if ended else f"that takes more than {patience:.0f} seconds"
            until = f" (seen up to step {self.agreed} of {self._ended})" if 0 <= self.agreed < self._ended else ""
            said.append(f"not compared with {self.reference} to the end{until}: {why}; `introspect diff` compares them")
        elif self._command and not ended:
            said.append(f"the command of --on-divergence takes more than {patience:.0f} seconds and is ended")
        return said

    def abandon(self) -> None:
        """Forget it, in a forked child."""
        self._beside.abandon()

    def _take(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [sentence for line in lines for sentence in self._sentences(json.loads(line))]

    def _sentences(self, facts: dict[str, Any]) -> list[str]:
        if "failed" in facts:
            self.code = UNDECIDED
            return [f"not compared with {self.reference} any further: {facts['failed']}"]
        if "agreed" in facts:
            self.agreed = facts["agreed"]
            return []
        said = str(facts["said"])
        if "first" in facts:
            self.first, self._place = (facts["first"],), facts["place"]
            return [f"against {self.reference}: {said}"]
        self.code = _CODES[facts["verdict"]]
        if self._place is not None and facts["place"] == self._place:
            said = "the whole run confirms that divergence"
        return [f"against {self.reference}, at the end: {said}"]

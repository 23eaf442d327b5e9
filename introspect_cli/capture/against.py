"""A run that is compared with another while it is written: what the script's process has of it.

That is one descriptor, which is looked at when a step ends. The comparison is another process's: a reference that
cannot be read, or takes long to read, costs its answer and nothing else.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.beside import PATIENCE, Beside
from introspect_cli.errors import UsageError
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.options import CaptureOptions

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
    from introspect_cli.store.pack import is_remote

    if is_remote(run):
        return run
    if not Path(run).exists():
        raise UsageError(f"there is no run at {run} to compare with")
    return os.path.abspath(run)  # noqa: PTH100 - a link stays one


class Against:
    """A process that compares a run with a reference."""

    def __init__(self, run: Path, options: CaptureOptions) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        assert options.against is not None
        near = os.path.relpath(options.against) if os.path.isabs(options.against) else options.against  # noqa: PTH117 - text
        self.reference = options.against if near.startswith(os.pardir) else near
        self.diverged = False
        self.code: int | None = None
        self._stop = self._decides = options.stop
        self._first = ""
        self._rest = b""
        question = {
            "reference": options.against,
            "run": str(run),
            "rtol": options.rtol,
            "noise": list(options.noise),
            "command": options.on_divergence,
        }
        module = "introspect_cli.commands.alongside"
        self._beside = Beside(module, [json.dumps(question)], "what compares", errors=False)

    def look(self, say: Callable[[str], None], *, ranks: int) -> bool:
        """Say what was found by now; whether the script is to be ended for it, which is so once.

        Args:
            say: takes a sentence.
            ranks: processes of the run.
        """
        data = self._beside.read()
        for sentence in self._take(data) if data else ():
            say(sentence)
        if not (self.diverged and self._stop):
            return False
        self._stop = False
        if ranks > 1:
            say("--stop ends one process, and this run has several: it goes on")
        return ranks == 1

    def exit_code(self, code: int | None) -> int | None:
        """What the process exits with, given the script's code: with `--stop`, `diff`'s where the script's is 0."""
        if not self._decides or code:
            return code
        return UNDECIDED if self.code is None else self.code

    def finish(self, patience: float = PATIENCE) -> list[str]:
        """Wait for the verdict, for a while; what is to be said of it."""
        data, ended = self._beside.rest(patience)
        said = self._take(data)
        if self.code is None:
            why = "what compares has ended early" if ended else f"that takes more than {patience:.0f} seconds"
            said.append(f"not compared with {self.reference} to the end: {why}; `introspect diff` compares them")
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
        said = str(facts["said"])
        if "first" in facts:
            self.diverged, self._first = True, said
            return [f"against {self.reference}: {said}"]
        self.code = _CODES[facts["verdict"]]
        if said == self._first:
            said = "the whole run confirms that divergence"
        return [f"against {self.reference}, at the end: {said}"]

"""Processes of introspect beside the script's: those that publish the run, and the one that compares it."""

from __future__ import annotations

import json
import os
import select
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED
from introspect_cli.script.processes import VARIABLE
from introspect_cli.store.files import DIVERGENCE, Handle
from introspect_cli.store.remote import is_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from introspect_cli.capture.capture import Capture
    from introspect_cli.capture.guard import Guard
    from introspect_cli.capture.recording.recorder import Recorder


# ---
# Processes of introspect beside the script's: one that only answers, and those that publish the run.
#
# The script sees nothing of them. Such a process is no child of the script's (which may wait for its children), has
# one descriptor to answer by, and stays when the script is interrupted. What it does costs training a processor at
# most: nothing waits for it before the end.
#
# A logger's client imports hundreds of modules, draws from python's random generator, talks to servers that hang. A
# thread that did so would share all that with training. So `introspect publish` reads the run as it is written, from
# outside, in such a process.

MAX_OUTPUT = 1 << 16
_SHELL = "/bin/sh"
_BEGIN = "import sys; sys.path[:] = [path for path in sys.path if path]; from {} import main; main()"
"""Runs a module's `main`; no file in the current directory is imported in a library's place."""


class BackgroundProcess:
    """A process of introspect beside the script, not its child, that reads the run's directory.

    Attributes:
        patience: seconds to wait for it at the end of a script.
    """

    patience = 30.0

    def __init__(self, module: str, words: Sequence[str], name: str, *, errors: bool = True) -> None:
        """Start the process; nothing waits for it, and it outlives an interrupt of the script.

        Its stdin is empty, its stdout is read by `read` and `rest`, and it is not captured itself.

        Args:
            module: of introspect, whose `main` it runs.
            words: its command line.
            name: what messages call it.
            errors: True if what it writes to stderr is read as its answer, too; False if that goes to the script's
                stderr.

        Raises:
            OSError: it cannot be started.
        """
        receive, answer = os.pipe()
        self._answer = Handle(receive, name)
        os.set_blocking(self._answer.fd, False)
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, answer, 1)]
        actions += [(os.POSIX_SPAWN_DUP2, answer, 2)] if errors else []
        try:
            # The shell ends at once, and what it has started in the background is nobody's child any more.
            command = [sys.executable, "-c", _BEGIN.format(module), *words]
            shell = [_SHELL, "-c", 'trap "" INT HUP; "$@" &', _SHELL, *command]
            pid = os.posix_spawn(_SHELL, shell, environment, file_actions=actions, setpgroup=0)
            os.waitpid(pid, 0)
        finally:
            os.close(answer)

    def read(self) -> bytes:
        """At most 64 KiB of the output that has not been read yet, without waiting.

        Empty where there is none, and where the script has closed the descriptor.
        """
        if not self._answer.is_ours():
            return b""
        with suppress(OSError):  # BlockingIOError: it has nothing to say
            return os.read(self._answer.fd, MAX_OUTPUT)
        return b""

    def rest(self, patience: float) -> tuple[bytes, bool]:
        """Wait at most `patience` seconds for the process to end, then close its descriptor.

        Returns:
            the last 64 KiB of the output not read yet; and whether the process has ended, or reading failed. Empty and
            False where the script had closed the descriptor before.
        """
        said, until, ended = b"", time.monotonic() + patience, False
        try:
            while self._answer.is_ours() and not ended:
                waits = select.poll()  # select() takes no descriptor above 1023, and a script may have opened as many
                waits.register(self._answer.fd, select.POLLIN)
                if not waits.poll(max(until - time.monotonic(), 0) * 1000):
                    break
                piece = os.read(self._answer.fd, MAX_OUTPUT)
                said, ended = (said + piece)[-MAX_OUTPUT:], not piece
        except OSError:  # the script closed what was not its own
            ended = True
        finally:
            self.abandon()
        return said, ended

    def abandon(self) -> None:
        """Close the descriptor that it answers by; the process itself goes on."""
        with suppress(OSError):
            self._answer.close()


UNPUBLISHED = " was not published to "
"""Words in the sentence on a place that failed."""


class Publishers:
    """Processes that publish one run to named places."""

    def __init__(self, path: Path, places: Sequence[str], guard: Guard, rank: int | None = None) -> None:
        """Start to publish to all places.

        Args:
            path: the run's directory.
            places: as given to `--publish`.
            guard: catches failures.
            rank: this process's; above 0 only remote storage is published to. None for a run of one process.
        """
        if rank:
            places = [place for place in places if is_remote(place)]
        self._guard = guard
        self._places = places
        self._process: BackgroundProcess | None = None
        if places:
            of_rank = () if rank is None else ("--rank", str(rank))
            with guard.around("publishing", "the run is"):
                words = ["publish", str(path), *places, *of_rank]
                self._process = BackgroundProcess("introspect_cli.cli", words, "what publishes")

    def finish(self) -> list[str]:
        """Wait at most 30 seconds for the process; returns sentences on what was published and what not."""
        if self._process is None:
            return []
        with self._guard.around("publishing", "the end of the run is"):
            said, ended = self._process.rest(self._process.patience)
            if not ended:
                return [f"still publishing to {', '.join(self._places)}, in the background"]
            lines = [line.removeprefix("introspect: ") for line in said.decode("utf-8", "replace").splitlines()]
            results = [line for line in lines if line.startswith("published ") or UNPUBLISHED in line]
            return results or [f"nothing was published: {lines[-1]}" if lines else "nothing was published"]
        return []

    def abandon(self) -> None:
        """Close the descriptor of the process, in a forked child."""
        if self._process is not None:
            self._process.abandon()


# ---
# A run that is compared with another while it is written: what the script's process has of it, on each rank.
#
# That is one descriptor, which is looked at when a step ends. The comparison is another process's: a reference that
# cannot be read, or takes long to read, costs its answer and nothing else.
#
# The ranks of a launch hear that the run diverges by a file of the first rank's, which the others open at each step:
# one rank alone has the comparison. Ranks that end at different steps wait for each other in a collective, so it says
# after which step all of them end: the one that it is about to begin. Whoever takes part in a collective of that step
# does so after the file was written, and looks at it when the step is over. The file is there from the beginning,
# since a file system over a network answers for a while that what was not there is not there.

_CODES = {"same": SAME, "diverged": DIVERGED, "undecided": UNDECIDED}


class Reference:
    """The run named by `--against`, as a session uses it; does nothing without one."""

    def __init__(self, capture: Capture, guarded: AbstractContextManager[None]) -> None:
        """Start the comparison, on rank 0 alone; without `options.against` nothing happens.

        Where all ranks have to learn of a divergence (`--stop`, `--keep-around`), also choose the file that says it.

        Args:
            capture: of the run that is compared.
            guarded: catches failures of the comparison.
        """
        options = self._options = capture.options
        self._guarded = guarded
        self._rank, launch = capture.rank, capture.launch
        self._process: BackgroundProcess | None = None
        self._called = ""
        """The reference, as messages call it."""
        self._first: tuple[int | None] | None = None
        """The step at which the runs diverge, None where it is not one step's; None while they do not."""
        self._agreed = -1
        """The last step up to which they were seen not to diverge, -1 before there is one."""
        self._code: int | None = None
        """The exit status of `diff`, once it is known."""
        self._place: list[Any] | None = None
        self._rest = b""
        self._notice: Path | None = None
        """File by which the first rank tells all ranks of a divergence; None where they need not know."""
        self._told: tuple[int | None, int] | None = None
        """The step at which the runs diverge, and the step after which all ranks end; None while they do not."""
        if options.against is not None:
            near = os.path.relpath(options.against) if os.path.isabs(options.against) else options.against  # noqa: PTH117 - text
            self._called = options.against if near.startswith(os.pardir) else near
            with guarded:
                if launch is not None and launch.world_size > 1 and (options.stop or options.keep_around):
                    self._notice = capture.store.path.parent / "rank0" / DIVERGENCE
                if not self._rank:
                    words = {"run": str(capture.path), "asked": shlex.split(options.diff or "")}
                    asked, module = json.dumps({"reference": options.against, **words}), "introspect_cli.commands.live"
                    self._process = BackgroundProcess(module, [asked], "what compares", errors=False)

    def digests(self) -> dict[int, bytes]:
        """Digest of each step of the reference on this rank, by step.

        {} without a reference, and where that is remote, cannot be read, or lacks this rank.
        """
        reference = self._options.against
        if reference is not None and not is_remote(reference):
            with self._guarded, suppress(StoreError):
                from introspect_cli.store.run import open_run

                with open_run(Path(reference)) as run:
                    return run.rank(self._rank).digests() if self._rank in run.ranks else {}
        return {}

    def poll(self, recorder: Recorder, say: Callable[[str], None]) -> bool:
        """Say what the comparison has reported since the last step, without waiting, and pass a divergence on.

        The recorder's black box is also told how far the runs agree. Where ranks share a file, rank 0 writes the
        divergence there and the others read it.

        Args:
            recorder: whose step has just ended.
            say: is given each sentence.

        Returns:
            With `--stop`, True from the first step on that ends after the divergence is reported (on several ranks,
            from the step that the file names). Else False.
        """
        if self._process is None and self._notice is None:
            return False
        ended = recorder.step - 1
        with self._guarded:
            for sentence in () if self._process is None else self._heard(self._process.read()):
                say(sentence)
            if self._told is None:
                with suppress(OSError, ValueError):  # a file that is half written is read again
                    self._share(ended)
            recorder.tell_comparison(self._agreed, self._told and self._told[:1])
        ends = self._options.stop and self._told is not None and ended >= self._told[1]
        if ends and not self._rank:
            say(f"the script is ended after step {ended} (--stop)")
        return ends

    def _share(self, ended: int) -> None:
        """Set `_told` where a divergence is known here, or written in the file that all ranks share.

        What is known here is written there: then all ranks end after the step that is about to begin.

        Args:
            ended: the step that has just ended.
        """
        if self._first is not None:
            self._told = self._first[0], ended + (self._notice is not None)
            if self._notice is not None:
                self._notice.write_text(json.dumps(self._told), encoding="utf-8")
        elif self._notice is not None:
            step, end = json.loads(self._notice.read_text(encoding="utf-8"))
            self._told = step, end

    @property
    def status(self) -> int | None:
        """With `--stop`, the exit status that `diff` would have: UNDECIDED as long as there is no verdict.

        None without `--stop`, on ranks other than 0, and where no comparison was started.
        """
        if self._process is None or not self._options.stop:
            return None
        return UNDECIDED if self._code is None else self._code

    def finish(self, recorder: Recorder | None) -> list[str]:
        """Wait at most 30 seconds for the verdict and pass it to the black box of `recorder`, unless that is None.

        Returns sentences on it; [] without a comparison.
        """
        said: list[str] = []
        with self._guarded:
            if self._process is not None:
                data, ended = self._process.rest(self._process.patience)
                said = [*self._heard(data)]
                if self._code is None:
                    patience = f"it took more than {self._process.patience:.0f} seconds"
                    why = "what compares has ended early" if ended else patience
                    said.append(f"not compared with {self._called} to the end: {why}; `introspect diff` compares them")
                if recorder is not None:
                    recorder.tell_comparison(self._agreed, self._first)
        return said

    def _heard(self, data: bytes) -> Iterator[str]:
        """Sentences on the messages, a line each, of what the process sends, none for `agreed`; the last may go on.

        Sets `code`, `agreed` or `first` by what a message has: `{"failed": why}`, `{"agreed": last step}`, `{"first":
        step, "place", "said"}`, or, at the end, `{"verdict", "place", "said"}`. A verdict with the place of the
        divergence that was reported before only confirms that one.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for facts in map(json.loads, lines):
            if "failed" in facts:
                self._code = UNDECIDED
                yield f"not compared with {self._called} any further: {facts['failed']}"
            elif "agreed" in facts:
                self._agreed = facts["agreed"]
            elif "first" in facts:
                self._first, self._place = (facts["first"],), facts["place"]
                yield f"against {self._called}: {facts['said']}"
            else:
                self._code = _CODES[facts["verdict"]]
                confirms = self._place is not None and facts["place"] == self._place
                said = "the whole run confirms that divergence" if confirms else facts["said"]
                yield f"against {self._called}, at the end: {said}"

    def abandon(self) -> None:
        """Forget the comparison in a forked child: close the descriptor here; process and file stay the parent's."""
        if self._process is not None:
            self._process.abandon()
        self._process = self._notice = None

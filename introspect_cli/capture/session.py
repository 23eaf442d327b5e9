"""One capture, from the directory it writes to the last word it says.

The script must run as if nobody watched, torch must not be loaded before the script loads it, a fork must not write, a
failure of ours must not become the script's, and whatever happens the store must say how far it goes. The session is
opened before the script, its probes are installed when the script's own `import torch` has finished, and it is closed
when the script's main part is over; everything between is the probes'.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.against import Against, digests_of
from introspect_cli.capture.environment.start import Start, numpy_state, prepare_torch, python_state
from introspect_cli.capture.manifest import Documents, closing, opening
from introspect_cli.capture.probes.base import Guard
from introspect_cli.capture.publishing import LOGGER, Publishing, logger_places
from introspect_cli.capture.ranks.divergence import Announcement
from introspect_cli.capture.ranks.launchers import find_launch, unlaunched
from introspect_cli.capture.run_directory import run_directory
from introspect_cli.capture.signals import Signals
from introspect_cli.capture.terminal import Terminal, summary
from introspect_cli.capture.tracebacks import TracebackFilter
from introspect_cli.errors import IntrospectError, StoreError
from introspect_cli.exit_codes import DIVERGED, UNDECIDED
from introspect_cli.machine import DISABLE_VARIABLE
from introspect_cli.records import Kind, count, human_size
from introspect_cli.script.ending import Ending, Held, leave
from introspect_cli.script.run import run
from introspect_cli.script.target import Target, check
from introspect_cli.store.writer import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from introspect_cli.capture.black_box import BlackBox
    from introspect_cli.capture.environment.read_files import ReadFiles
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.capture.probes.installed import Probes
    from introspect_cli.store.launch import Launch


def run_capture(target: Target, options: CaptureOptions, ready: Callable[[Path], None] | None = None) -> int:
    """Run a script under capture.

    Args:
        target: the script or module and its arguments.
        options: what to record and where.
        ready: called with the run's directory before the script's first line.

    Returns:
        the script's exit code; the caller ends the process with it.

    Raises:
        UsageError: there is nothing to run.
        StoreError: the run's directory exists, or cannot be made.
    """
    check(target)
    session = Session(target, options)
    if ready is not None:
        ready(session.path)
    ending = run(target, started=session.start, ended=session.finish)
    session.last_word()
    leave(session.exit_code(ending))


class Session:
    """Opens the store, installs the probes, and closes both."""

    def __init__(self, target: Target | None, options: CaptureOptions, launch: Launch | None = None) -> None:
        """Make the run's directory and take hold of it.

        Args:
            target: what will run; None where the caller runs it (the Python API).
            options: what to record and where.
            launch: this process's part in a distributed run; None to ask the environment.

        Raises:
            StoreError: the directory exists, or cannot be made.
        """
        self.options = options
        self.target = target
        self.launch = launch or find_launch()
        self.rank = self.launch.rank if self.launch is not None else 0
        self.path = run_directory(target, options.output, self.launch)
        self._store = StoreWriter.create(self.path, force=options.force, durable=options.durable, launch=self.launch)
        self._terminal = Terminal(self.launch, quiet=options.quiet, progress=options.progress)
        self._guard = Guard(self._terminal.say)
        self._settings = self._guard.around("settings", "settings are")
        self._comparing = self._guard.around("comparing", "the comparison is")
        self.probes: Probes | None = None
        """What watches; None before torch is there."""
        self._closed = False
        self._store_lost = ""
        self._tracebacks = TracebackFilter()
        self._signals = Signals(self._guard.sections)
        self._words: list[str] = []
        self._stops = False
        self._documents = Documents(target, options, self._store, self._guard, self.launch)
        self._start = Start(
            self._torch_imported,
            seed=options.seed,
            deterministic=options.deterministic,
            guarded=self._guard.around("session", "the state of numpy's generator is"),
        )
        self._began = self._start.states
        self._files: ReadFiles | None = None
        self._manifest = opening(target, options, self.launch)
        with self._store_errors():
            self._store.write_manifest(self._manifest)
        self._publishing: list[Publishing] = []
        self._publish([place for place in options.publish if place != LOGGER])
        self._against: Against | None = None
        self._announcement: Announcement | None = None
        self._followed = False
        if options.against is not None:
            with self._comparing:
                if self.launch is not None and self.launch.world_size > 1 and (options.stop or options.keep_around):
                    self._announcement = Announcement(self._store.path, self.rank)
                if not self.rank:  # of several ranks, the first compares all of them
                    self._against = Against(self.path, options)

    def _publish(self, places: list[str]) -> None:
        """Begin to publish; of several ranks, the first does."""
        if places and not self.rank:
            with self._guard.around("publishing", "the run is"):
                self._publishing.append(Publishing(self.path, places))

    @property
    def rows(self) -> int:
        """Records written so far."""
        return self.probes.rank.rows_written if self.probes is not None else 0

    def start(self) -> None:
        """Be ready for the script's first line."""
        _forget_in_forks(self)
        self._documents.begin()
        self._tracebacks.install()
        self._signals.install()
        self._watch_files()
        self._start.install()

    def join(self, began: dict[str, bytes | None]) -> None:
        """Begin in a process of somebody else's, whose script has just imported torch.

        Args:
            began: states of random generators as the process found them, by library; more may be put in later.
        """
        _forget_in_forks(self)
        self._followed = True
        self._began = began
        self._tracebacks.install()
        self._signals.install()
        self._watch_files()
        self._torch_imported()

    def _watch_files(self) -> None:
        with self._guard.around("files", "files that the script reads are"):
            self._files = self._documents.watch_files()

    @property
    def words(self) -> list[str]:
        """What there is to say at the end."""
        return list(self._words)

    def attach(self) -> None:
        """Install the probes into a process that has torch already (notebooks, tests, benchmarks)."""
        self._began = {"python": python_state(), "numpy": numpy_state()}
        self._torch_imported()

    def adopt(self, model: Any) -> None:
        """Name a model that exists already, and hear of optimizers that were built before this capture."""
        probes = self.probes
        if probes is None:
            return
        import gc

        from torch.optim import Optimizer

        if any(issubclass(type(thing), Optimizer) for thing in gc.get_objects()):
            probes.context.clock.expect_optimizers()
        if model is not None:
            probes.names.state(model, None)

    def _torch_imported(self) -> None:
        """Install the probes; called inside the script's `import torch`."""
        with self._guard.around("session", "the script's values are"):
            prepare_torch(self.options.seed, deterministic=self.options.deterministic)
            from introspect_cli.capture.probes.installed import Probes

            _warn_if_slow(self._terminal)
            ranks = self.launch.world_size if self.launch is not None else 1
            box = self._black_box(ranks)
            probes = Probes(self.options, self._store, self._guard, self._lost, self._began, self.rank, ranks, box)
            probes.context.clock.on_tick.append(self._ticked)
            probes.install()
            self.probes = probes

    def _black_box(self, ranks: int) -> BlackBox | None:
        """What holds whole tensors of the last steps, with a word on what that may cost; None where nothing does."""
        steps, size, against = self.options.keep_around, self.options.keep_size, self.options.against
        if steps is None:
            return None
        from introspect_cli.capture.black_box import BlackBox, default_room

        room = default_room(ranks) if size is None else size
        digests = None
        if against is not None:
            digests = {}
            with self._comparing:
                digests = digests_of(against, self.rank)
        if not self.rank:
            why = "--keep-size" if size is not None else "a quarter of what is free; --keep-size sets it"
            held = f"whole tensors of the last {count(steps, 'step')} are held"
            self._terminal.say(f"{held}, in {human_size(room)} of memory at most ({why})")
        return BlackBox(steps, room, self._store, digests, self._tell, self._guard.note)

    def _tell(self, sentence: str) -> None:
        """Say something now; with the last words, once the script is over."""
        if self._closed:
            self._words.append(sentence)
        else:
            self._terminal.say(sentence)

    def _ticked(self) -> None:
        probes = self.probes
        if probes is None:
            return
        with self._settings:
            try:
                self._documents.write(probes)
                if probes.context.clock.ticks == 1:
                    self._documents.write_all()
                    self._tell_of_others()
                self._terminal.progress(probes.recorder.step, probes.rank.rows_written, probes.rank.bytes_written)
            except (IntrospectError, OSError) as error:
                self._store_failed(error)
        if probes.context.clock.ticks == 1 and LOGGER in self.options.publish:
            with self._guard.around("publishing", "the run is"):
                found = logger_places()
                self._publish(found)
                if not found:
                    self._terminal.say(
                        "--publish logger: neither Lightning nor transformers' Trainer logs to anything known"
                    )
        self._look_at_reference(probes)
        if probes.keeping.nan_at is not None:
            self._terminal.say(f"step {probes.keeping.nan_at} made a NaN; the script is ended (--until-nan)")
            raise SystemExit(0)
        last = self.options.until_step
        if last is not None and probes.recorder.step > last:
            # Asked for by the user: the script ends as if it had called sys.exit(), handlers and all.
            raise SystemExit(0)

    def _look_at_reference(self, probes: Probes) -> None:
        """Say what a comparison has found, and end the script where that was asked for."""
        ended, stops_after = probes.recorder.step - 1, None
        with self._comparing:
            first = None
            if self._against is not None:
                for sentence in self._against.look(ended):
                    self._terminal.say(sentence)
                first = self._against.first
                stops_after = None if first is None else ended
            if self._announcement is not None:
                said = self._announcement.hear() if first is None else self._announcement.say(first[0], ended + 1)
                if said is not None:
                    first, stops_after = (said.first,), said.after
            probes.recorder.compared(-1 if self._against is None else self._against.agreed, first)
        if self.options.stop and stops_after is not None and ended >= stops_after and not self._stops:
            self._stops = True
            if not self.rank:
                self._terminal.say(f"the script is ended after step {ended} (--stop)")
            self._manifest["stopped"] = True
            # A launcher takes the first rank that fails for a crash and kills the others: one of them says it, as the
            # last, or whoever has started the launcher.
            raise SystemExit(0 if self.rank or self._followed else DIVERGED)

    @property
    def status(self) -> int | None:
        """With `--stop`, the exit status of `diff`; None without, or where another process compares."""
        if self._against is None or not self.options.stop:
            return None
        return UNDECIDED if self._against.code is None else self._against.code

    def exit_code(self, ending: Ending) -> int | None:
        """What the process exits with: the script's code; with `--stop`, `diff`'s where the script's is 0."""
        return ending.exit_code if self.status is None or ending.exit_code else self.status

    def _tell_of_others(self) -> None:
        """Tell of ranks that this run is without: a script that starts them itself, as Lightning does."""
        found = unlaunched() if self.launch is None else None
        if found is not None:
            self._manifest["alone"] = {"rank": found[0], "world_size": found[1]}
            self._guard.note(
                f"this process is rank {found[0]} of {found[1]}, and the others are not in this run: no launcher said "
                f"so at its start; use `introspect capture torchrun --nproc-per-node {found[1]} ...`"
            )
            if Kind.COLLECTIVE in self.options.record:
                self._guard.note("collectives are not recorded: this was no process of several when the capture began")

    def finish(self, ending: Ending) -> None:
        """Take the probes out, write what is left, and close the store."""
        if self._closed:
            return
        held = Held()
        held.hold()
        try:
            self._finish(ending)
        finally:
            held.release()

    def _finish(self, ending: Ending) -> None:
        self._closed = True
        self._guard.script_is_over = True
        self._start.remove()
        if self._files is not None:
            self._files.remove()
        self._signals.remove()
        self._tracebacks.remove()
        self._terminal.clear()
        probes = self.probes
        steps = 0
        if probes is not None:
            probes.remove()
            steps = probes.recorder.steps_written
        with self._store_errors():
            if probes is not None:
                probes.context.clock.finish()
                if not probes.context.clock.has_optimizer:
                    steps = probes.recorder.steps_written
                probes.keeping.finish(probes.recorder.step - 1)
                for sentence in probes.keeping.unmatched(launched=self.launch is not None):
                    self._guard.note(sentence)
        if probes is not None:
            for sentence in probes.names.unmatched():
                self._guard.note(sentence)
        with self._store_errors():
            if probes is not None:
                probes.rank.modules(probes.names.new_modules())
                self._documents.write(probes)
            if "torch" in sys.modules:
                self._documents.write_all()
            for sentence in self._documents.notes():
                self._guard.note(sentence)
        with self._store_errors():
            self._manifest["status"] = "interrupted" if self._store_lost else "complete"
            self._manifest |= closing(self.options, self._guard, probes, ending, steps)
            self._store.write_manifest(self._manifest)
        with self._store_errors():
            if probes is not None:
                probes.close()
        with self._store_errors():
            self._store.close()
        self._words.append(self._summary())
        with self._guard.around("publishing", "the end of the run is"):
            self._words += [sentence for publishing in self._publishing for sentence in publishing.finish()]
        if self._against is not None:
            with self._comparing:
                self._words += self._against.finish()
                self._write_held()
        if self._announcement is not None and not self.rank:
            self._announcement.close()

    def _write_held(self) -> None:
        """Write what is held, where the comparison has said only now that the runs diverge."""
        box = self.probes.keeping.box if self.probes is not None else None
        if self.probes is None or self._against is None or box is None:
            return
        before = len(box.written)
        self.probes.recorder.compared(self._against.agreed, self._against.first)
        if len(box.written) > before:
            with self._store_errors():
                self._store.write_manifest(self._manifest | {"kept_around": box.written})
                self._store.close()

    def _summary(self) -> str:
        probes = self.probes
        if probes is None and "session" in self._guard.failed:
            return f"the probes could not be installed, so nothing was recorded; {self.path} holds its settings only"
        if probes is None:
            return f"the script never imported torch, so nothing was recorded; {self.path} holds its settings only"
        return summary(self.path, self.options, self.launch, probes, self._manifest, lost=bool(self._store_lost))

    def last_word(self) -> None:
        """Say where the run is, after the script has said everything it had to say."""
        if not self.rank or self._store_lost:  # of many ranks, one says where the run is
            for words in self._words:
                self._terminal.say(words)
        self._words = []

    def forked(self) -> None:
        """In a child that the script forked: record nothing, write nothing, say nothing."""
        self._closed = True
        self._words = []
        for publishing in self._publishing:
            publishing.abandon()
        if self._against is not None:
            self._against.abandon()
            self._against = None
        if self._files is not None:
            self._files.remove()
        if self.probes is not None:
            self.probes.forked()
        self._store.abandon()

    def _lost(self, error: StoreError) -> None:
        if not self._store_lost:
            self._store_lost = str(error)
            self._guard.note(f"{error}; the script goes on, the run ends here")

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Go on without a store that can no longer be written; anything else is a failure of ours."""
        with self._guard.around("session", "the end of the run is"):
            try:
                yield
            except (IntrospectError, OSError) as error:
                self._store_failed(error)

    def _store_failed(self, error: Exception) -> None:
        if self._guard.passes(error):
            raise error
        self._lost(StoreError(str(error)))


def _forget_in_forks(session: Session) -> None:
    """Have a session know when it is in a forked child, as long as it lives."""
    reference = weakref.ref(session)

    def in_child() -> None:
        found = reference()
        if found is not None:
            found.forked()

    os.register_at_fork(after_in_child=in_child)


def _warn_if_slow(terminal: Terminal) -> None:
    """Tell who has no compiled kernels what that costs, and the remedy; who switched them off knows."""
    from introspect_cli.tensors import kernels

    if kernels.REASON and not kernels.REASON.startswith(DISABLE_VARIABLE):
        terminal.say(
            f"no compiled kernels ({kernels.REASON}): torch operations compute the same, some 50 times slower; "
            "with a C++ compiler on this machine, install introspect-cli again"
        )

"""One capture, from the directory it writes to the last word it says.

The script must run as if nobody watched, torch must not be loaded before the script loads it, a fork must not write, a
failure of ours must not become the script's, and whatever happens the store must say how far it goes. The session is
opened before the script, its probes are installed when the script's own `import torch` has finished, and it is closed
when the script's main part is over; everything between is the probes'.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.background import UNPUBLISHED, Publishers, Reference
from introspect_cli.capture.capture import Capture
from introspect_cli.capture.guard import Guard
from introspect_cli.capture.interpreter import Interpreter
from introspect_cli.capture.manifest import Documents, closing, opening, without_others
from introspect_cli.capture.ranks.launchers import find_launch, run_directory
from introspect_cli.capture.start import Start, prepare_torch
from introspect_cli.errors import IntrospectError, StoreError
from introspect_cli.exit_codes import DIVERGED
from introspect_cli.script.ending import Ending, raised_ending, tell
from introspect_cli.script.run import run
from introspect_cli.script.target import Target, check
from introspect_cli.store.files import CHILDREN
from introspect_cli.store.run_writer import StoreWriter
from introspect_cli.tensors import kernels as _kernels  # noqa: F401 - says that they are missing before the script runs
from introspect_cli.texts import count, human_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typing_extensions import Self

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.guard import Guarded
    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.store.run_writer import Launch


def last_words(capture: Capture, context: Context | None, manifest: dict[str, Any], *, lost: bool) -> str:
    """Last sentence of a run, for the terminal: steps, records, size, directory; or why nothing was recorded.

    Args:
        capture: of the run.
        context: has recorded, asked for its counts; None without probes.
        manifest: as written at the end; its `steps` and `remainder` are read.
        lost: whether the store could not be written to the end; then the sentence says up to which step it can be read.
    """
    path = capture.path
    if context is None:
        failed = "session" in capture.guard.failed
        why = "the probes could not be installed" if failed else "the script never imported torch"
        return f"{why}, so nothing was recorded; {path} holds its settings only"
    written, rows, last = context.rank.written, context.rank.written.rows, context.rank.last_step
    if lost:
        steps = count(context.recorder.steps_written, "step")
        is_there = last is not None and path.exists()
        seen = f"{steps} up to step {last} can be read in {path};" if is_there else f"recorded {steps} in {path},"
        return f"{seen} then the store was lost"
    if not rows and (path / CHILDREN).is_dir():
        return f"recorded what the processes that the script started trained in {path}"
    if not rows:
        return f"no module was called and no optimizer stepped while recording; {path} has no records"
    rest = " and what came after" if manifest.get("remainder") else ""
    if context.policy.dropped:
        rest += f" and dropped {context.policy.dropped:,} of them again"
    if (moved := context.perturbed) is not None:
        rest += f" after --perturb {moved['seed']} moved {count(moved['parameters'], 'parameter')} by one rounding"
    steps, size = count(manifest.get("steps", 0), "step"), human_size(written.length)
    return f"recorded {steps}{rest}, {count(rows, 'record')} ({size}) in {path}"


def run_capture(
    target: Target, options: CaptureOptions, ready: Callable[[Path], None] | None = None
) -> int | BaseException | None:
    """Run a script or module under capture in this process.

    Args:
        target: the script or module and its arguments.
        options: what to record and where.
        ready: called with the run's directory before the script's first line.

    Returns:
        What is to end the process: what the script raised, or the exit code.

    Raises:
        UsageError: there is nothing to run.
        StoreError: the run's directory exists, or cannot be made.
    """
    check(target)
    session = Session(target, options)
    if ready is not None:
        ready(session.path)

    def ended(ending: Ending) -> None:
        """Close the run, and say what there is to say."""
        session.finish(ending)
        session.print_last_words()

    ending = run(target, started=session.start, ended=ended)
    return ending.raised if ending.exit_code else session.reference.status


class Session:
    """Opens the store, installs the probes, and closes both.

    Attributes:
        path: the run's directory.
        context: what watches shares this; None before torch is there.
        words: what there is to say at the end.
        reference: the run that this one is compared with.
    """

    def __init__(self, target: Target | None, options: CaptureOptions, launch: Launch | None = None) -> None:
        """Create the run's directory and its store, and start publishers and comparison; probes are installed later.

        Args:
            target: what will run; None where the caller runs it (the Python API).
            options: what to record and where.
            launch: this process's part in a distributed run; None to look for it in the environment.

        Raises:
            StoreError: the directory exists, or cannot be made.
        """
        launch = launch or find_launch()
        self.path = path = run_directory(target, options.output, launch)
        self.context: Context | None = None
        self.words: list[str] = []
        store = StoreWriter.create(path, force=options.force, durable=options.durable, launch=launch)
        who = f"introspect, rank {launch.rank}" if launch is not None else "introspect"
        self._say: Callable[[str], None] = functools.partial(tell, who=None if options.quiet else who)
        self._guard = guard = Guard(self._say)
        self._settings = guard.around("settings", "settings are")
        self._end = guard.around("session", "the end of the run is")
        self._interpreter = Interpreter(guard)
        self._closed = self._followed = False
        self._store_lost = ""
        seed, deterministic = options.seed, options.deterministic
        guarded = guard.around("session", "the states of python's and numpy's generators are")
        self._start = Start(self._torch_imported, seed=seed, deterministic=deterministic, guarded=guarded)
        tell_lost, began = self._note_lost, self._start.states
        self._capture = capture = Capture(options, target, launch, path, store, guard, self._tell, tell_lost, began)
        self.rank = capture.rank
        self._documents = Documents(capture)
        self._manifest = opening(capture)
        with self._writing(self._end):
            store.write_manifest(self._manifest)
        self._publishers = Publishers(path, options.publish, guard, self.rank if launch is not None else None)
        self.reference = Reference(capture, guard.around("comparing", "the comparison is"))

    def start(self, began: dict[str, bytes | None] | None = None) -> None:
        """Keep the script's text, and install the watchers of signals, files and imports, before its first line.

        The probes follow inside the script's `import torch`; at once where torch is there already.

        Args:
            began: in a followed process that has just imported torch, the bytes of the states of python's and numpy's
                generators when the process began, by library.
        """
        self._documents.begin()
        stop = weakref.WeakMethod(self.stop_in_child)
        os.register_at_fork(after_in_child=lambda: (alive := stop()) and alive())
        self._interpreter.install()
        self._documents.files.install()
        self._followed = began is not None
        if began is None:
            self._start.install()
        else:
            self._capture.began.update(began)
            self._torch_imported()

    def adopt(self, model: Any) -> None:
        """Name a model that exists already, None for none; if any optimizer is alive, its steps are to end steps.

        It walks all objects that the garbage collector knows. Nothing before the probes are installed.
        """
        if (context := self.context) is None:
            return
        import gc

        from torch.optim import Optimizer

        if any(issubclass(type(thing), Optimizer) for thing in gc.get_objects()):
            context.clock.expect_optimizers()
        if model is not None:
            context.names.ensure_named(model, None)

    def _torch_imported(self) -> None:
        """Build and install the probes, seed torch as asked; called inside the script's `import torch`."""
        with self._guard.around("session", "the script's values are"):
            options = self._capture.options
            prepare_torch(options.seed, deterministic=options.deterministic)
            from introspect_cli.capture.all_probes import put_probes
            from introspect_cli.capture.context import Context

            context = Context(self._capture, self.reference)
            put_probes(context)
            listeners = context.clock.listeners
            listeners["on_ending"].append(functools.partial(self._write_documents, context))
            context.install()
            listeners["on_tick"].append(functools.partial(self._end_step, context))  # last: it may end the script
            self.context = context

    def _tell(self, sentence: str) -> None:
        """Print a sentence, or keep it for `print_last_words` once the script is over."""
        if self._closed:
            self.words.append(sentence)
        else:
            self._say(sentence)

    def _write_documents(self, context: Context) -> None:
        """Write changed documents before a step is written, all before the first: whoever reads it has them."""
        with self._writing(self._settings):
            if not context.recorder.step:
                self._documents.write_all()
                if self._capture.launch is None:
                    self._manifest |= without_others(self._capture)
            self._documents.write()
            self._write_unseen()

    def _write_unseen(self) -> None:
        """Write what is not observed as soon as that is known, so that a run that is killed says it; without details.

        What was raised may hold values of the script's, which are redacted as the run ends.
        """
        said = [sentence.partition(": ")[0] for sentence in self._guard.sentences]
        if said != self._manifest.get("not_observed", []):
            self._manifest |= {"not_observed": said, "failures": sorted(self._guard.failed)}
            self._capture.store.write_manifest(self._manifest)

    def _end_step(self, context: Context) -> None:
        """End the script as a step ends, where an option says so.

        Raises:
            SystemExit: because of `--stop`, `--until-nan` or `--until-step`; with 1 for `--stop` on rank 0 of a process
                that was not followed, else with 0.
        """
        if self.reference.poll(context.recorder, self._say):
            self._manifest["stopped"] = True
            # A launcher takes the first rank that fails for a crash and kills the others: one of them says it, as the
            # last, or whoever has started the launcher.
            raise SystemExit(0 if self.rank or self._followed else DIVERGED)
        if context.policy.nan_at is not None:
            self._say(f"step {context.policy.nan_at} made a NaN; the script is ended (--until-nan)")
            raise SystemExit(0)
        if (last := self._capture.options.until_step) is not None and context.recorder.step > last:
            # Asked for by the user: the script ends as if it had called sys.exit(), handlers and all.
            raise SystemExit(0)

    def __enter__(self) -> Self:
        """Start nothing yet; the end of the `with` block finishes it, with the exception that it ends by."""
        return self

    def __exit__(self, cls: object, error: BaseException | None, tb: object) -> None:
        """Finish."""
        self.finish(Ending(0, "returned") if error is None else raised_ending(error))

    def finish(self, ending: Ending) -> None:
        """Remove the probes, write what remains, and close the store; at the first call alone.

        Then wait for publishers and comparison, 30 seconds at most for each. Signals wait until all is done; what their
        handlers raise comes out.
        """
        try:
            with self._end:
                if not self._closed:
                    self._finish(ending)
        finally:
            try:
                self._interpreter.remove()
            except Exception as error:  # ours: what is left in place does only what python's does
                self._guard.failure("interpreter", "tracebacks and signals may still be watched and are", error)

    def _finish(self, ending: Ending) -> None:
        """Do the work of `finish`; a failure in one part does not keep the others from being done."""
        self._closed = True
        self._guard.script_is_over = True
        self._start.remove()
        self._documents.files.remove()
        if (context := self.context) is not None:
            context.remove(over=True)
            with self._writing(self._end):
                context.finish()
            for sentence in context.names.wanted.unmatched():
                self._guard.note(sentence)
        with self._writing(self._end):
            if self._store_lost:  # there may be no room for this after the rest
                self._write_ending(ending)
        with self._writing(self._end):
            if context is not None:
                context.rank.modules(context.names.new_modules())
            if "torch" in sys.modules:
                self._documents.write_all(ending.raised)
            for sentence in self._documents.sources.notes():
                self._guard.note(sentence)
        with self._writing(self._end):
            self._write_ending(ending)
        with self._writing(self._end):
            if "ended" not in self._manifest:  # that has failed
                self._write_unseen()
        with self._writing(self._end):
            if context is not None:
                context.close()
        with self._writing(self._end):
            self._capture.store.close()
        self._conclude(context)

    def _write_ending(self, ending: Ending) -> None:
        """Write how the run ended."""
        self._manifest |= closing(self._capture, self.context, ending)
        self._manifest["status"] = "interrupted" if self._store_lost else "complete"
        self._capture.store.write_manifest(self._manifest)

    def _conclude(self, context: Context | None) -> None:
        """Wait for publishers and comparison, put the last words in `words`, and write what the comparison changes."""
        self.words.append(last_words(self._capture, context, self._manifest, lost=bool(self._store_lost)))
        self.words += self._publishers.finish()
        box = context.policy.box if context is not None else None
        before = len(box.written) if box is not None else 0
        self.words += self.reference.finish(context.recorder if context is not None else None)
        if box is not None and len(box.written) > before:  # the comparison has said only now that the runs diverge
            with self._writing(self._end):
                self._capture.store.write_manifest(self._manifest | {"kept_around": box.written})
                self._capture.store.close()

    def print_last_words(self) -> None:
        """Print `words` and empty them; on ranks above 0 only where the store was lost, else what was not published."""
        # Of many ranks, one says where the run is, and each what it could not send.
        for sentence in self.words:
            if not self.rank or self._store_lost or UNPUBLISHED in sentence:
                self._say(sentence)
        self.words = []

    def stop_in_child(self) -> None:
        """Switch everything off in a forked child without closing the parent's store."""
        self._closed = True
        self.words = []
        self._publishers.abandon()
        self.reference.abandon()
        self._documents.files.remove()
        if self.context is not None:
            self.context.stop_in_child()
        self._capture.store.abandon()

    def _note_lost(self, error: StoreError) -> None:
        """Note that the store can no longer be written, and keep the reason; nothing at later calls.

        The run's status will be `interrupted`.
        """
        if not self._store_lost:
            self._store_lost = str(error)
            self._guard.note(f"{error}; the script goes on, the run ends here")

    @contextlib.contextmanager
    def _writing(self, guarded: Guarded) -> Iterator[None]:
        """Context in which an error of the store or the disk is noted and ends the recording, not the script.

        Args:
            guarded: catches every other mistake.
        """
        with guarded:
            try:
                yield
            except (IntrospectError, OSError) as error:
                if self._guard.is_scripts(error):
                    raise
                self._note_lost(StoreError(str(error)))

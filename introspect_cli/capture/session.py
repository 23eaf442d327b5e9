"""One capture, from the directory it writes to the last word it says.

The problem: the script must run as if nobody watched, torch must not be loaded before the script loads it, a fork
must not write, a failure of ours must not become the script's, and whatever happens the store must say how far it
goes. The way: the session is opened before the script, its probes are installed when the script's own `import torch`
has finished, and it is closed when the script's main part is over; everything between is the probes'.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.environment import determinism, redact, sources
from introspect_cli.capture.generators import numpy_state, python_state
from introspect_cli.capture.imports import ImportWatch
from introspect_cli.capture.probes.guard import Guard
from introspect_cli.capture.progress import Progress, human_size
from introspect_cli.capture.tracebacks import TracebackFilter
from introspect_cli.errors import IntrospectError, StoreError
from introspect_cli.script import Ending, Target, check, leave, run
from introspect_cli.store.files import RUNS
from introspect_cli.store.writer import StoreWriter
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.capture.probes.installed import Probes


def run_capture(target: Target, options: CaptureOptions) -> int:
    """Run a script under capture.

    Args:
        target: the script or module and its arguments.
        options: what to record and where.

    Returns:
        the script's exit code; the caller ends the process with it.

    Raises:
        UsageError: there is nothing to run.
        StoreError: the run's directory exists, or cannot be made.
    """
    check(target)
    session = Session(target, options)
    ending = run(target, started=session.start, ended=session.finish)
    session.last_word()
    leave(ending.exit_code)


class Session:
    """Opens the store, installs the probes, and closes both."""

    def __init__(self, target: Target | None, options: CaptureOptions) -> None:
        """Make the run's directory and take hold of it.

        Args:
            target: what will run; None where the caller runs it (the Python API).
            options: what to record and where.

        Raises:
            StoreError: the directory exists, or cannot be made.
        """
        self.options = options
        self.target = target
        self.rank, ranks = distributed_rank()
        if ranks > 1:
            # One process, one store: a lock cannot be shared by processes that nobody else ties together.
            together = options.output or fresh_run(target)
            self.path = together.with_name(f"{together.name}-rank{self.rank}")
        else:
            self.path = options.output or own_run(target)
        self._store = StoreWriter.create(self.path, force=options.force)
        self._guard = Guard(self._warn)
        self._progress = Progress(quiet=options.quiet)
        self._probes: Probes | None = None
        self._closed = False
        self._store_lost = ""
        self._tracebacks = TracebackFilter()
        self._words: list[str] = []
        self._sources: dict[str, str] = {}
        self._manifest: dict[str, Any] = {
            "tool": {"name": "introspect-cli", "version": __version__},
            "status": "running",
            "started": _now(),
            "options": options.to_dict(),
        }
        self._began: dict[str, bytes | None] = {}
        script = target.script if target is not None else None
        sources.set_project(os.path.dirname(os.path.realpath(script)) if script else str(Path.cwd()))  # noqa: PTH120 - realpath first
        self._imports = ImportWatch({"numpy": self._numpy_imported, "torch": self._torch_imported})
        if target is not None:
            self._manifest |= {"script": script, "module": target.module}
            shown = redact.arguments(target.args, options.redact)
            self._manifest["argv"] = [script or f"-m {target.module}", *shown]
        with self._store_errors():
            self._store.write_manifest(self._manifest)

    def _numpy_imported(self) -> None:
        """Note what numpy's generator starts from, before the script can seed it."""
        try:
            self._began["numpy"] = numpy_state()
            if self.options.seed is not None:
                determinism.seed_numpy(self.options.seed)
        except Exception as error:
            self._guard.failure("session", "the state of numpy's generator is", error)

    @property
    def probes(self) -> Probes | None:
        """What watches; None before torch is there."""
        return self._probes

    @property
    def rows(self) -> int:
        """Records written so far."""
        return self._probes.rank.rows_written if self._probes is not None else 0

    def start(self) -> None:
        """Be ready for the script's first line."""
        ref = weakref.ref(self)

        def in_child() -> None:
            session = ref()
            if session is not None:
                session.forked()

        os.register_at_fork(after_in_child=in_child)
        self._began["python"] = python_state()
        if self.options.seed is not None:
            determinism.seed_python(self.options.seed)
        if self.options.deterministic:
            determinism.environment()
        self._tracebacks.install()
        self._imports.install()

    def attach(self) -> None:
        """Install the probes into a process that has torch already (notebooks, tests, benchmarks)."""
        self._began = {"python": python_state(), "numpy": numpy_state()}
        self._torch_imported()

    def adopt(self, model: Any) -> None:
        """Name a model that exists already, and hear of optimizers that were built before this capture."""
        probes = self._probes
        if probes is None:
            return
        import gc

        from torch.optim import Optimizer

        if any(issubclass(type(thing), Optimizer) for thing in gc.get_objects()):
            probes.context.has_optimizer = True
        if model is not None:
            probes.names.state(model, None)

    def _torch_imported(self) -> None:
        """Install the probes; called inside the script's `import torch`."""
        try:
            if self.options.seed is not None:
                determinism.seed_torch(self.options.seed)
            if self.options.deterministic:
                determinism.torch_flags()
            from introspect_cli.capture.probes.installed import Probes

            self._tell_if_slow()
            probes = Probes(self.options, self._store, self._guard, self._lost, self._began, self.rank)
            probes.context.on_tick.append(self._ticked)
            probes.install()
            self._probes = probes
        except Exception as error:
            self._guard.failure("session", "nothing is", error)

    def _tell_if_slow(self) -> None:
        """Tell who has no compiled kernels what that costs, and the remedy; who switched them off knows."""
        from introspect_cli.tensors import kernels

        if kernels.REASON and not kernels.REASON.startswith(kernels.DISABLE_VARIABLE):
            self._say(
                f"no compiled kernels ({kernels.REASON}): torch operations compute the same, some 50 times slower; "
                "with a C++ compiler on this machine, install introspect-cli again"
            )

    def _ticked(self) -> None:
        probes = self._probes
        if probes is None:
            return
        try:
            if probes.context.ticks == 1 or probes.optimizers.settings_changed or probes.context.nested.changed:
                self._write_settings(probes)
            self._progress.update(probes.recorder.step, probes.rank.rows_written, probes.rank.bytes_written)
        except StoreError as error:
            self._lost(error)
        except Exception as error:
            self._guard.failure("settings", "settings are", error)
        last = self.options.until_step
        if last is not None and probes.recorder.step > last:
            # Asked for by the user: the script ends as if it had called sys.exit(), handlers and all.
            raise SystemExit(0)

    def _write_settings(self, probes: Probes) -> None:
        """Keep the settings as soon as a step is complete, so that a run that is killed has them."""
        store, options = self._store, self.options
        if probes.optimizers.settings_changed:
            probes.optimizers.settings_changed = False
            store.write_settings("optimizers", probes.optimizers.settings)
        nested = probes.context.nested
        if nested.changed:
            nested.changed = False
            store.write_settings("nested", nested.found)
        if options.source:
            # The first hash stands: it is nearest to what was imported.
            found = sources.imported_sources() | self._sources
            if found != self._sources:
                self._sources = found
                store.write_settings("sources", found)
        if probes.context.ticks <= 1:
            self._write_fixed_settings()

    def _write_fixed_settings(self) -> None:
        from introspect_cli.capture.environment import settings

        options, target = self.options, self.target
        if target is not None:
            words = (target.args, target.script, target.module, options.redact)
            self._write_document("command", lambda: settings.command(*words))
        self._write_document("runtime", settings.runtime)
        self._write_document("hardware", settings.hardware)
        self._write_document("seeds", lambda: {"seed": options.seed, "deterministic": options.deterministic})
        if options.source:
            self._write_document("git", lambda: settings.git(sources.Project.root))
        if options.env:
            self._write_document("environment", lambda: redact.environment(os.environ, options.redact))
        if options.packages:
            self._write_document("packages", settings.packages)

    def _write_document(self, name: str, ask: Callable[[], object]) -> None:
        """Write one document of settings; one that cannot be had costs no other."""
        try:
            self._store.write_settings(name, ask())
        except StoreError:
            raise
        except Exception as error:
            self._guard.failure(f"settings {name}", f"{name} settings are", error)

    def finish(self, ending: Ending) -> None:
        """Take the probes out, write what is left, and close the store."""
        if self._closed:
            return
        self._closed = True
        self._imports.remove()
        self._tracebacks.remove()
        self._progress.clear()
        probes = self._probes
        steps = 0
        if probes is not None:
            probes.remove()
            steps = probes.recorder.steps_written
        with self._store_errors():
            if probes is not None:
                probes.context.finish()
                if not probes.context.has_optimizer:
                    steps = probes.recorder.steps_written
        with self._store_errors():
            if probes is not None:
                probes.rank.modules(probes.names.new_modules())
                probes.optimizers.settings_changed |= bool(probes.optimizers.settings)
                ticks, probes.context.ticks = probes.context.ticks, 0
                self._write_settings(probes)
                probes.context.ticks = ticks
            elif "torch" in sys.modules:
                self._write_fixed_settings()
        with self._store_errors():
            self._manifest |= {
                "status": "interrupted" if self._store_lost else "complete",
                "ended": _now(),
                "exit_code": ending.exit_code,
                "how": ending.how,
                "exception": redact.looks(ending.exception),
                "observed": sorted(kind.value for kind in self.options.record),
                "not_observed": self._guard.sentences,
                "notes": probes.notes if probes is not None else [],
                "children": probes.children.started if probes is not None else [],
                "failures": self._guard.details,
            }
            # What comes after the last optimizer step is in the store as one more step, and is none.
            self._manifest |= {
                "steps": steps,
                "remainder": probes is not None and probes.recorder.steps_written > steps,
            }
            self._store.write_manifest(self._manifest)
        with self._store_errors():
            if probes is not None:
                probes.close()
        with self._store_errors():
            self._store.close()
        self._words.append(self._summary())

    def _summary(self) -> str:
        probes = self._probes
        if probes is None:
            return f"the script never imported torch, so nothing was recorded; {self.path} holds its settings only"
        if self._store_lost:
            return f"recorded {probes.recorder.steps_written:,} steps in {self.path}, then the store was lost"
        steps, rows = self._manifest.get("steps", 0), probes.rank.rows_written
        if not rows:
            return f"no module was called and no optimizer stepped while recording; {self.path} has no records"
        size = human_size(probes.rank.bytes_written)
        rest = " and what came after" if self._manifest.get("remainder") else ""
        return f"recorded {steps:,} step{'s' * (steps != 1)}{rest}, {rows:,} records ({size}) in {self.path}"

    def last_word(self) -> None:
        """Say where the run is, after the script has said everything it had to say."""
        for words in self._words:
            self._say(words)
        self._words = []

    def forked(self) -> None:
        """In a child that the script forked: record nothing, write nothing, say nothing."""
        self._closed = True
        self._words = []
        if self._probes is not None:
            self._probes.forked()
        self._store.abandon()

    def _lost(self, error: StoreError) -> None:
        if not self._store_lost:
            self._store_lost = str(error)
            self._guard.note(f"{error}; the script goes on, the run ends here")

    @contextlib.contextmanager
    def _store_errors(self) -> Any:
        try:
            yield
        except (IntrospectError, OSError) as error:
            self._lost(StoreError(str(error)))
        except Exception as error:
            self._guard.failure("session", "the end of the run is", error)

    def _warn(self, sentence: str) -> None:
        self._progress.clear()
        self._say(sentence)

    def _say(self, sentence: str) -> None:
        if self.options.quiet:
            return
        with contextlib.suppress(OSError, ValueError, UnicodeError):
            sys.stderr.write(f"introspect: {sentence}\n")
            sys.stderr.flush()


def distributed_rank() -> tuple[int, int]:
    """The rank of this process and their number, as launchers such as torchrun tell them; (0, 1) where none did."""
    try:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)


def fresh_run(target: Target | None) -> Path:
    """A directory under `introspect-runs/` that does not exist yet, named by the script and the time."""
    name = "run"
    if target is not None:
        name = target.module or Path(target.script or "run").stem or "run"
    stem = f"{name}-{dt.datetime.now().strftime('%Y%m%d-%H%M%S')}"  # noqa: DTZ005 - the user's own clock, for the user
    path, number = Path(RUNS) / stem, 1
    while path.exists():
        number += 1
        path = Path(RUNS) / f"{stem}-{number}"
    return path


def own_run(target: Target | None) -> Path:
    """A fresh run's directory, made, so that captures that start in the same second have one each."""
    while True:
        path = fresh_run(target)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                return path  # what stands in the way is told by whoever opens the store
            continue
        except OSError:
            return path  # as above
        return path


def _now() -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")

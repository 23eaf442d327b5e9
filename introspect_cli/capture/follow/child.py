"""A capture in a python process that somebody else started.

The process is the script's own: python runs it, and it prints and ends as it would alone. We are there from its first
moment, through `sitecustomize`, and wait: most python processes below a launcher train nothing. The one that imports
torch does; when that import has finished, the capture begins as if it had been there all along, with the states of the
random generators as they were at the start. It ends with the process.

Everything that is imported here at the top is imported before the process's first line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.follow.orders import Note
from introspect_cli.script.processes import VARIABLE, Process, Role, described

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.session import Session


def begin() -> None:
    """Follow this process if the environment holds an order: a script always, a worker with `--children all`.

    Never raises: whatever fails, the process is not followed.
    """
    if not (text := os.environ.get(VARIABLE)):
        return
    with contextlib.suppress(Exception):  # the process is not ours to fail
        order, process = json.loads(text), described(sys.orig_argv)
        everyone = order["options"]["children"] == "all"
        if process.role is Role.SCRIPT:
            Follower(order, process).install()
        elif process.role is Role.WORKER and everyone:
            _watch_worker(order, process)


@dataclass
class Follower:
    """Waits for torch in one process, and records it from then on; `install` begins to wait.

    Attributes:
        order: as `order_of` has made it.
        process: this one.
    """

    order: dict[str, Any]
    process: Process
    _session: Session | None = None
    _raised: BaseException | None = None
    _pid: int = field(default_factory=os.getpid)

    def install(self) -> None:
        """Wait for the script's `import torch`, by an import hook, after which `record` is called; leave a note."""
        from introspect_cli.capture.start import Start

        options = self.order["options"]
        self._leave_note("started")
        self._start = Start(self.record, seed=options["seed"], deterministic=options["deterministic"])
        self._start.install()

    def record(self) -> None:
        """Start the capture and leave a note; a failure is noted too, and the process goes on. Nothing in a fork.

        Unless all processes are followed, the order is dropped from the environment first.
        """
        if os.getpid() != self._pid:
            return  # a fork: its parent was to be followed
        try:
            from introspect_cli.capture.ranks.launchers import forget_spawned

            if self.order["options"]["children"] != "all":
                self._drop_order()
            self._session = session = self._open_session()
            forget_spawned()
            session.start(self._start.states)
            self._hook_end()
            self._leave_note("recording", run=str(session.path))
        except Exception as error:
            self._leave_note("failed", said=[f"{type(error).__name__}: {error}"])

    def _drop_order(self) -> None:
        """Drop the order from the environment and restore PYTHONPATH, so that child processes are not followed."""
        for name, before in ((VARIABLE, None), ("PYTHONPATH", self.order["paths"])):
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before

    def _open_session(self) -> Session:
        """Make a session in the run's directory, else in the first free one of 999 below its children.

        Raises:
            StoreError: none could be made, for another reason than being there already.
        """
        from introspect_cli.capture.follow.orders import options_in
        from introspect_cli.capture.session import Session
        from introspect_cli.errors import StoreError
        from introspect_cli.script.target import Target
        from introspect_cli.store.files import CHILDREN

        order, process = self.order, self.process
        script = process.script if process.module or process.script else "-c"
        target = Target(script, process.module, process.args, tuple(order["launcher"]), order["launched_in"])
        options = replace(options_in(order), force=False)
        path, number = options.output, 0
        assert path is not None
        while True:
            place = path / CHILDREN / f"{number}-{Path(process.name).stem or 'python'}" if number else path
            try:
                return Session(target, replace(options, output=place))
            except StoreError:
                number += 1
                if not place.exists() or number == 1000:
                    raise

    def _hook_end(self) -> None:
        """Have `atexit` call `finish`; note an uncaught exception, if `sys.excepthook` is python's own."""
        from introspect_cli.script.ending import hook_exceptions, strip_frames

        def note(error: BaseException) -> None:
            """Note an uncaught exception, and remove introspect's frames from it."""
            self._raised = error
            strip_frames(error)

        if sys.excepthook is sys.__excepthook__:
            hook_exceptions(note)
        atexit.register(self.finish)

    def finish(self) -> None:
        """Close the run as the process ends, and leave a note; nothing in a fork, without a run, or a second time."""
        from introspect_cli.script.ending import Ending, raised_ending

        session, self._session = self._session, None
        if session is None or os.getpid() != self._pid:
            return
        session.finish(Ending(None, "ended") if self._raised is None else raised_ending(self._raised))
        said = [] if session.rank else [f"{self.process.name}: {words}" for words in session.words]
        self._leave_note("finished", run=str(session.path), said=said, code=session.reference.status)

    def _leave_note(self, state: str, run: str = "", said: list[str] | None = None, code: int | None = None) -> None:
        """Leave a note of this process, replacing its last one.

        Args:
            state: as in `Note`.
            run: where it records.
            said: sentences for the person; None for none.
            code: as in `Note`.
        """
        Note(self.process.name, state, run, said or [], code).leave(self.order["notes"])


def _watch_worker(order: dict[str, Any], process: Process) -> None:
    """Replace `BaseProcess._bootstrap`, to follow this worker once it knows its target, if `work_of` names one."""
    from multiprocessing.process import BaseProcess

    original: Callable[..., Any] = BaseProcess._bootstrap  # type: ignore[attr-defined]  # noqa: SLF001 - runs in the child alone

    def bootstrap(self: BaseProcess, *args: Any, **kwargs: Any) -> Any:
        """Follow the worker if `work_of` names its target; run it as python does; then close its run."""
        follower = None
        with contextlib.suppress(Exception):
            from introspect_cli.capture.probes.children import SPAWN, work_of
            from introspect_cli.capture.ranks.launchers import SPAWNED

            held: Any = self
            if getattr(held._target, "__module__", "") == SPAWN:  # noqa: SLF001 - as below
                os.environ[SPAWNED.rank] = str(held._args[1])  # noqa: SLF001 - as below
            work = work_of(self)
            if work:
                worker = replace(process, role=Role.SCRIPT, script=work)
                follower = Follower(order, worker)
                follower.install()
        try:
            return original(self, *args, **kwargs)
        finally:
            if follower is not None:
                with contextlib.suppress(Exception):
                    follower.finish()

    BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]  # noqa: SLF001 - as above

"""Running a launcher, a shell script or a test runner, and recording the python processes that train below it."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.environment import redact
from introspect_cli.capture.follow.orders import Note, notes_in, order_of
from introspect_cli.capture.ranks.launchers import new_run
from introspect_cli.errors import UsageError
from introspect_cli.script.ending import tell
from introspect_cli.script.processes import VARIABLE
from introspect_cli.store.run_writer import refuse_or_remove

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.script.target import Target


_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
SITE = str(Path(__file__).with_name("site"))


def run_followed(command: Sequence[str], target: Target, options: CaptureOptions, words: Sequence[str]) -> int:
    """Run a command, with each python process below it that imports torch recorded; wait, and print what came of it.

    A run's directory that is left empty is removed; with `force`, one that exists is removed before.

    Args:
        command: its command line.
        target: what was asked for, for the run's name.
        options: what to record and where.
        words: what was asked for, as it was written.

    Returns:
        The command's exit code; where that is 0, the highest that a comparison with `--stop` asks for. If a signal
        ended the command, this process is ended by the same one.

    Raises:
        UsageError: processes are not to be followed, or the command cannot be started.
        StoreError: the run's directory exists, and `force` is off.
    """
    if options.children == "none":
        raise UsageError(
            f"{words[0]} starts other processes, and --children none follows none: nothing would be recorded"
        )
    path = Path(os.path.abspath(options.output or new_run(target)))  # noqa: PTH100 - a link stays one
    refuse_or_remove(path, force=options.force)
    with tempfile.TemporaryDirectory(prefix="introspect-") as notes:
        launcher = redact.arguments((*(["-m"] if target.module else []), *words), options.redact)
        followed = replace(options, output=path, force=False)
        code = _run_command(command, followed_environment(followed, notes, tuple(launcher)))
        left = notes_in(Path(notes))
    _print_report(left, options, words)
    with contextlib.suppress(OSError):
        path.rmdir()  # made by us, and nobody wrote to it
    if code < 0:
        _end_by_signal(-code)
    asked = [note.code for note in left if note.code is not None]
    return code or max(asked, default=0)  # where the ranks of a run are compared, one of them says


def followed_environment(options: CaptureOptions, notes: str, launcher: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment variables, all of them, of a process below which python processes are followed.

    Args:
        options: of the capture, `output` absolute.
        notes: the directory where the processes leave their notes.
        launcher: the command that is captured, without secrets; empty for the children of a script.
    """
    paths = os.environ.get("PYTHONPATH")
    launched_in = os.getcwd() if launcher else ""  # noqa: PTH109 - text
    order = order_of(options, notes=notes, paths=paths, launcher=launcher, launched_in=launched_in)
    return {**os.environ, VARIABLE: order, "PYTHONPATH": os.pathsep.join([SITE, *([paths] if paths else [])])}


def _run_command(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run the command to its end, passing signals on; its exit code, minus the signal's number if one ended it.

    Raises:
        UsageError: it cannot be started.
    """
    try:
        process = subprocess.Popen(command, env=environment)  # noqa: S603 - the user's own command
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}") from None

    def pass_on(number: int, _frame: Any) -> None:
        """Send the signal to the process; nothing if it is gone."""
        with contextlib.suppress(OSError):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # the terminal has sent it to the command too
                return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_by_signal(number: int) -> None:
    """End this process by a signal, its handler set to the default; returns if the signal ends no process."""
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _print_report(left: Sequence[Note], options: CaptureOptions, words: Sequence[str]) -> None:
    """Print on stderr what each process said of its run, and what to do where none recorded; nothing with `--quiet`.

    Args:
        left: the notes that the processes left.
        options: of the capture.
        words: what was asked for, as it was written.
    """
    said = [sentence for note in left if note.state == "finished" for sentence in note.said]
    for note in left:
        if note.state == "recording":
            said.append(f"{note.name} ended without closing its run; {note.run} holds it up to its last step")
        elif note.state == "failed":
            said += [f"{note.name} was not recorded: {why}" for why in note.said]
    if all(note.state == "started" for note in left):
        seen = ", ".join(dict.fromkeys(note.name for note in left)) + " ended without importing torch"
        unseen = f"no python process with introspect-cli was seen below {words[0]}"
        said.append(
            f"nothing was recorded: {seen if left else unseen}; if training runs elsewhere (another environment, "
            "machine or container, or python -I or -E), put `introspect capture -o RUN` in the place of `python` there"
        )
    for sentence in said if not options.quiet else ():
        tell(sentence)


def follow_children(options: CaptureOptions, path: Path) -> None:
    """Set this process's environment so that all later python child processes record below the run's `children`.

    Makes a temporary directory for their notes, which is removed at exit.

    Args:
        options: of the capture.
        path: of the run, absolute.
    """
    notes = tempfile.mkdtemp(prefix="introspect-")
    os.environ.update(followed_environment(replace(options, output=path, force=False), notes))
    atexit.register(shutil.rmtree, notes, ignore_errors=True)

"""Python processes that need not start: forks of one that has imported what takes long.

Importing torch and its compiler takes longer than a small run. Where starting is not what is looked at, a process that
has imported them waits at a socket, and whoever wants a python there says what it is to run and hands over its streams.
`Forks.python` is a program that stands for python in that way, for what starts processes itself.

Run as a program, this file is such a server, or that python's own end of the socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # whoever stands for python imports next to nothing
    from collections.abc import Sequence
    from pathlib import Path
    from subprocess import CompletedProcess, Popen
    from typing import Any, NoReturn, TextIO

_START = """
import socket, sys
sys.path.insert(0, sys.argv[2])
from forks import serve
del sys.path[0], sys.modules["forks"]  # else it passes for a source of the script's
{imported}
serve(socket.socket(fileno=int(sys.argv[1])))
"""
_PACKAGE = """
import importlib, pkgutil, introspect_cli.cli
def imported(*packages):
    for package in packages:
        place = importlib.import_module(f"introspect_cli.{package}")
        for found in pkgutil.walk_packages(place.__path__, f"introspect_cli.{package}."):
            importlib.import_module(found.name)
"""
"""What a fork would import for itself takes longer than most of what is asked of it."""
_TORCH = f"""
import numpy, pyarrow, torch, torch._dynamo  # every optimizer imports the last one
{_PACKAGE}
import introspect_cli.commands.capture
imported("script", "store", "capture")
from introspect_cli.capture.background import BackgroundProcess
BackgroundProcess.patience = 900.0  # no answer depends on how busy the machine is
from introspect_cli.capture.environment import sources
from introspect_cli.capture.frames import pass_by
import sys
pass_by()  # marks all code of the package, once
for module in list(sys.modules.values()): sources.is_users(sources.file_of(module))  # which remembers its answers
"""
_PLAIN = f"""
import sys, numpy.ma, rich.console, rich.table
{_PACKAGE}
for verb in introspect_cli.cli.VERBS: introspect_cli.cli.command_of(verb)
imported("store", "compare", "inspect", "health", "exchange", "rerun", "publish", "render")
assert "torch" not in sys.modules, "nothing but a capture imports torch"
"""


_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"  # what python reads when it starts, and a fork can do as well


def serve(listening: socket.socket) -> None:
    """Fork whenever one is asked for, until the process that started this one ends.

    A signal that is sent for a run goes on to it; one for which nobody asks any more is ended.
    """
    import gc
    import weakref

    gc.freeze()  # a recording looks through all objects for optimizers; there is none among these
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]  # noqa: SLF001 - torch's, which take long
        finalizer.atexit = False
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    running: dict[int, socket.socket] = {}
    while True:
        heard: list[Any] = [0, listening, woken, *running.values()]
        ready = select.select(heard, [], [])[0]
        if 0 in ready:
            break
        if woken in ready:
            os.read(woken, 64)
            _end(running)
        for child, connection in running.items():
            if connection in ready:
                sent = connection.recv(1)
                os.kill(child, sent[0] if sent else signal.SIGKILL)
        if listening in ready:
            connection, _ = listening.accept()
            try:
                asked, streams = _received(connection)
            except (OSError, ValueError):  # who asks has ended meanwhile
                connection.close()
                continue
            child = os.fork()
            if not child:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (woken, wakes):
                    os.close(number)
                for opened in (listening, connection, *running.values()):
                    opened.close()
                _run(streams=streams, **asked)
            running[child] = connection
            for number in streams:
                os.close(number)
    for child in running:
        os.kill(child, signal.SIGKILL)
    os._exit(0)  # taking apart what was imported takes a second


def _end(running: dict[int, socket.socket]) -> None:
    """Say how those that have ended did."""
    for child in list(running):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            with running.pop(child) as connection, contextlib.suppress(OSError):  # who asked may have ended
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(**asked: Any) -> NoReturn:
    """In a fork: run it, and end as python would, but for taking apart all that was imported, which takes longer."""
    import atexit
    import threading

    code: object = 0
    try:
        _become(**asked)
    except SystemExit as ending:
        code = ending.code
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public waits for threads
    atexit._run_exitfuncs()  # noqa: SLF001 - nor calls these
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF if isinstance(code, int) else code is not None)


def _become(*, argv: list[str], env: dict[str, str], cwd: str, python: str, streams: list[int]) -> None:
    """In a fork: run `python -m introspect_cli ...`, `-c CODE ...` or `SCRIPT ...` as a process started so would."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    added = [place for place in env.get("PYTHONPATH", "").split(":") if place not in sys.path]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[1:1] = added
    sys.dont_write_bytecode = bool(env.get(_NO_BYTECODE))
    sys.executable = python
    sys.orig_argv = [python, *argv]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as a process of its own begins; python's own generator sees to it itself
    if argv[:2] == ["-m", "introspect_cli"]:
        sys.argv = ["introspect", *argv[2:]]
        sys.modules["introspect_cli.cli"].main()
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(argv[1], {"__name__": "__main__"})
    else:
        _run_script(argv)


def _run_script(argv: list[str]) -> None:
    """As python does: the script's path is whole in what it prints of frames, and above them stands nothing."""
    import types

    path = os.path.abspath(argv[0])  # noqa: PTH100 - links stay as they are
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120 - as python has it
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__file__=path, __builtins__=__builtins__, __cached__=None)
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib would be imported for it
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _received(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    data = b""
    while len(data) < int(size):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError
        data += part
    return json.loads(data), streams


class Run:
    """A run that was asked for."""

    def __init__(
        self, address: str, argv: Sequence[str], env: dict[str, str], cwd: str, python: str, streams: Sequence[int]
    ) -> None:
        """Ask for one.

        Args:
            address: of the server.
            argv: what follows `python`: `-m introspect_cli ...`, or a script and its arguments.
            env: the whole environment.
            cwd: where it runs.
            python: what it is to start other processes with.
            streams: descriptors of standard input, output and error.
        """
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        data = json.dumps({"argv": argv, "env": env, "cwd": cwd, "python": python}).encode()
        socket.send_fds(self._connection, [f"{len(data):8}".encode()], list(streams))
        self._connection.sendall(data)

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._connection.send(bytes([number]))

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._connection.close()

    def wait(self) -> int:
        """Its exit code when it has ended, negative where a signal ended it."""
        with self._connection:
            return int(self._connection.recv(8))


_LIVE = "introspect_cli.commands.live"
"""What a capture starts beside itself, by `python -c`."""
_PICKLED = (".pt", ".pth", ".ckpt")


def _server_of(argv: Sequence[str]) -> str:
    """Which server runs it: only what trains needs torch, or reads what torch wrote."""
    is_verb = list(argv[:2]) == ["-m", "introspect_cli"] and argv[2] != "capture"
    return "plain" if (is_verb and not any(word.endswith(_PICKLED) for word in argv)) or argv[0] == "-c" else "torch"


class Forks:
    """The servers of one process, which end with it; each starts when it is first needed."""

    def __init__(self, imports: str = "") -> None:
        """None is started yet.

        Args:
            imports: what the one with torch imports beside torch.
        """
        import tempfile
        import threading
        from pathlib import Path

        self._folder = Path(tempfile.mkdtemp(prefix="forks"))
        self._imported = {"torch": _TORCH + imports, "plain": _PLAIN}
        self._servers: dict[str, Popen[bytes]] = {}
        self._starting = threading.Lock()

    def _server(self, name: str) -> str:
        """The address of one, which is started if it is not there."""
        import subprocess
        from pathlib import Path

        address = str(self._folder / name)
        with self._starting:
            if name not in self._servers:
                with socket.socket(socket.AF_UNIX) as listening:
                    listening.bind(address)
                    listening.listen(64)
                    source = _START.format(imported=self._imported[name])
                    command = [sys.executable, "-c", source, str(listening.fileno()), str(Path(__file__).parent)]
                    self._servers[name] = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,  # closed when we end
                        stdout=subprocess.DEVNULL,  # no terminal: python decides when it starts how it buffers
                        pass_fds=(listening.fileno(),),
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
        return address

    def stand_in(self) -> Path:
        """A program that stands for python: quick where it is to run the tool or a script, else python itself."""
        import shlex

        program = self._folder / "python3"
        addresses = {name: self._server(name) for name in self._imported}
        about = json.dumps([sys.executable, addresses, _settings()])
        words = (sys.executable, "-SsE", os.path.abspath(__file__), str(program), about)  # noqa: PTH100
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
        return program

    def close(self) -> None:
        """End the servers; nothing may be asked for any more."""
        import shutil

        for server in self._servers.values():
            server.communicate()
        shutil.rmtree(self._folder)

    def start(self, argv: Sequence[str], env: dict[str, str], cwd: str | Path, *streams: int) -> Run:
        """Start `python ARGV...` in a directory, with `env` added to the environment; its streams are descriptors."""
        whole, place = {**os.environ, **env}, os.path.abspath(cwd)  # noqa: PTH100 - links stay as they are
        return Run(self._server(_server_of(argv)), argv, whole, place, sys.executable, streams)

    def __call__(
        self, *arguments: str, env: Sequence[tuple[str, str]] = (), cwd: str | Path = "."
    ) -> CompletedProcess[str]:
        """Run `introspect ARGUMENTS...` in a directory, with `env` added to the environment."""
        return self.python("-m", "introspect_cli", *arguments, env=env, cwd=cwd)

    def python(
        self, *argv: str | Path, env: Sequence[tuple[str, str]] = (), cwd: str | Path = "."
    ) -> CompletedProcess[str]:
        """Run `python ARGV...`, which is a script and its arguments, or `-m introspect_cli` and what follows."""
        import tempfile
        from pathlib import Path
        from subprocess import CompletedProcess

        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, Path(os.devnull).open() as none:
            words = list(map(str, argv))
            run = self.start(words, dict(env), cwd, none.fileno(), out.fileno(), err.fileno())
            code = run.wait()
            return CompletedProcess(words, code, *(_text(stream) for stream in (out, err)))


def _text(stream: TextIO) -> str:
    stream.seek(0)
    return stream.read()


def _settings() -> dict[str, str]:
    """What a process has from the one that starts it, and a fork of another has not: what python reads, and limits."""
    import resource

    limits = {name: str(resource.getrlimit(getattr(resource, name))) for name in dir(resource) if name[:7] == "RLIMIT_"}
    read = {name: value for name, value in os.environ.items() if name.startswith("PYTHON") and name != _NO_BYTECODE}
    return limits | read


def _stand_in(name: str, about: str, *argv: str) -> int:
    """Be a python for one run, in the place of the program `name`."""
    python, addresses, settings = json.loads(about)
    argv = argv[argv[:1] == ("-u",) :]  # as torchrun starts its processes; what they print comes at their end, then
    is_run = argv[:2] == ("-m", "introspect_cli") or (argv and argv[0][:1] != "-")
    is_run = is_run or (argv[:1] == ("-c",) and _LIVE in argv[1])
    if not is_run or settings != _settings():
        os.execv(python, [python, *argv])
    run = Run(addresses[_server_of(argv)], argv, dict(os.environ), os.getcwd(), name, (0, 1, 2))  # noqa: PTH109
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: run.send(number))
    code = run.wait()
    if code < 0:
        if -code != signal.SIGKILL:  # which nobody can catch
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(_stand_in(*sys.argv[1:]))

"""Commands and scripts in forks of a process that has imported torch: importing takes longer than a small run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


HERE = str(Path(__file__).parent)


def become(argv: list[str], env: dict[str, str], cwd: str, out: int, err: int, *, is_capture: bool) -> None:
    """In a fork: run a command of the tool, which ends the process, or a script alone, as one started so would be.

    Args:
        argv: of the process.
        env: what its environment has beside ours.
        cwd: where it runs.
        out: descriptor of its standard output.
        err: of its standard error.
        is_capture: whether the tool runs.
    """
    import numpy as np

    import introspect_cli.cli

    for number, own in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(own, number)
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[1:1] = env["PYTHONPATH"].split(":") if "PYTHONPATH" in env else []
    np.random.seed()  # noqa: NPY002  # as a process of its own begins; python's own generator sees to it itself
    sys.argv = argv
    if is_capture:
        introspect_cli.cli.main()
    sys.path[0] = os.path.dirname(argv[0])  # noqa: PTH120 - as python has it
    runpy.run_path(argv[0], run_name="__main__")


class Forks:
    """Runs commands, and scripts alone, in forks of a process that has imported torch; one such process a thread."""

    _SOURCE = """
import atexit, gc, json, os, sys
import numpy, pyarrow, torch, torch._dynamo  # every optimizer imports the last one
import introspect_cli.cli, introspect_cli.commands.capture, introspect_cli.capture.probes.installed
sys.path.insert(0, sys.argv[1])
from forks import become
del sys.path[0], sys.modules["forks"]  # else it passes for a source of the script's
gc.freeze()  # a recording looks through all objects for optimizers; there is none among these
for line in sys.stdin:
    is_capture, arguments, env, cwd, *streams = json.loads(line)
    child = os.fork()
    if child == 0:
        atexit.register(gc.unfreeze)  # what is frozen at the end is said to have leaked
        out, err = (os.open(name, os.O_WRONLY) for name in streams)
        become(arguments, env, cwd, out, err, is_capture=is_capture)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

    def __init__(self) -> None:
        self._local = threading.local()
        self._servers: list[subprocess.Popen[str]] = []

    def close(self) -> None:
        """End the processes; no command may run any more."""
        for server in self._servers:
            server.communicate()

    def __call__(
        self, *arguments: str, env: Sequence[tuple[str, str]] = (), cwd: str | Path = "."
    ) -> subprocess.CompletedProcess[str]:
        """Run `introspect ARGUMENTS...` in a directory, with `env` added to the environment."""
        return self._run("introspect", *arguments, env=env, cwd=cwd, is_capture=True)

    def python(self, script: str | Path, *arguments: str, cwd: str | Path = ".") -> subprocess.CompletedProcess[str]:
        """Run `python SCRIPT ARGUMENTS...` in a directory, without the tool."""
        return self._run(str(script), *arguments, cwd=cwd, is_capture=False)

    def _run(
        self, *arguments: str, cwd: str | Path, is_capture: bool, env: Sequence[tuple[str, str]] = ()
    ) -> subprocess.CompletedProcess[str]:
        if not hasattr(self._local, "server"):
            command = [sys.executable, "-c", self._SOURCE, HERE]
            self._local.server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self._servers.append(self._local.server)
        server = self._local.server
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            asked = [is_capture, arguments, dict(env), str(Path(cwd).absolute()), out.name, err.name]
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            return subprocess.CompletedProcess(arguments, int(server.stdout.readline()), out.read(), err.read())

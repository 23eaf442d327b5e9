"""What a python process is, by its command line.

A capture that follows into processes must not enter the many that train nothing: data loaders' workers, compilers,
package managers, agents that only start others. Their command lines tell them apart, before anything is imported.

Everything that is imported here at the top, a process imports before its first line, so it is little.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


VARIABLE = "INTROSPECT_FOLLOW"
"""The environment variable that tells python processes to be followed, and how."""


class Role(Enum):
    """Kind of a python process, by its command line."""

    SCRIPT = "script"
    LAUNCHER = "launcher"
    WORKER = "worker"
    HELPER = "helper"


@dataclass(frozen=True)
class Process:
    """A python process.

    Attributes:
        role: what it does.
        script: its script; None for a module or for code.
        module: its module.
        args: what follows on the command line.
        code: what follows `-c`; None for anything else.
        interpreter: the interpreter and its options, without `-m` or `-c`; of letters in one word (`-Bm`) those before.
    """

    role: Role
    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    code: str | None = None
    interpreter: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it runs, for messages: module, file name of the script, or `python -c`."""
        return self.module or (os.path.basename(self.script) if self.script else "python -c")  # noqa: PTH119 - text


_ROLES = (
    (Role.LAUNCHER, "script", r"(^|/)(torchrun|accelerate|accelerate-launch|deepspeed|ds|fabric|lightning|uv|uvx)$"),
    (Role.LAUNCHER, "module", r"^(torch\.distributed\.(run|launch)|accelerate\.commands\.\w+)(\.__main__)?$"),
    (Role.LAUNCHER, "module", r"^(deepspeed\.launcher\.\w+|lightning[._]fabric\.cli)(\.__main__)?$"),
    (Role.HELPER, "script", r"(^|/)(pip3?|ninja|cmake|tensorboard|jupyter(-\w+)?|wheel|virtualenv)$"),
    (Role.HELPER, "script", r"(^|/)(pre-commit|ruff|mypy)$"),
    (Role.HELPER, "script", r"/(site|dist)-packages/(torch/(_inductor|utils)|triton|joblib|wandb|ray)/"),
    (Role.HELPER, "module", r"^(pip|ensurepip|venv|setuptools|build|torch\._inductor|torch\.utils|triton)(\.|$)"),
    (Role.HELPER, "module", r"^(multiprocessing|joblib|tensorboard|introspect_cli|wandb|ray)(\.|$)"),
    (Role.HELPER, "code", r"\b(resource_tracker|semaphore_tracker|setuptools|torch\._inductor)\b"),
    (Role.WORKER, "code", r"\bmultiprocessing\.(spawn|forkserver)\b"),
)
"""Of a process that runs a script, a module or code, the role that it has if that matches."""


def described(words: Sequence[str]) -> Process:
    """Role, and script, module or code, of a python process by its command line alone; an interactive one is a HELPER.

    Args:
        words: its command line, as in `sys.orig_argv`: the interpreter, its options, what it runs.
    """
    at = 1
    while at < len(words) and words[at].startswith("-") and len(words[at]) > 1:
        word, at = words[at], at + 1
        if word.startswith("--"):
            at += word == "--check-hash-based-pycs"
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in "cmWX":  # what a value follows
                before = (*words[: at - 1], *([word[: place - 1]] if place > 2 else []))
                value = word[place:] or (words[at] if at < len(words) else "")
                at += not word[place:]
                if kind := {"c": "code", "m": "module"}.get(letter):
                    return Process(_role_of(kind, value), args=tuple(words[at:]), interpreter=before, **{kind: value})
                break
    before = tuple(words[:at])
    if at >= len(words) or words[at] == "-":
        return Process(Role.HELPER, interpreter=before)  # an interactive interpreter
    return Process(_role_of("script", words[at]), script=words[at], args=tuple(words[at + 1 :]), interpreter=before)


def _role_of(kind: str, text: str) -> Role:
    """Role by what a process runs: SCRIPT where no row of `_ROLES` matches."""
    return next((role for role, of, pattern in _ROLES if of == kind and re.search(pattern, text)), Role.SCRIPT)


def command_of(words: Sequence[str], *, module: bool, interpreter: str) -> list[str] | None:
    """Command line to run as a process that is followed: of a launcher, a file that is not python's, or a command.

    None where this process runs the python script or module itself, and where there is no such file or command.

    Args:
        words: what was given to `capture`: a script or command with its arguments, or a module with its.
        module: whether the first word is a module, after -m.
        interpreter: the python to run a module with.
    """
    first = words[0]
    if module:
        return [interpreter, "-m", *words] if _role_of("module", first) is Role.LAUNCHER else None
    path = Path(first)
    if path.is_file() or (path / "__main__.py").exists():
        if not path.is_file() or path.suffix in {".py", ".pyc", ".pyz", ".zip"}:
            return None
        shell = _interpreter_of(path)
        launcher = _role_of("script", first) is Role.LAUNCHER
        if not shell and not launcher:
            return None
        return [os.path.abspath(first), *words[1:]] if os.access(path, os.X_OK) else [*shell, *words]  # noqa: PTH100
    executable = shutil.which(first)
    return [executable, *words[1:]] if executable else None


def _interpreter_of(path: Path) -> list[str]:
    """Words to put before a file to run it: its `#!` line, its own path for a binary, else `sh` for `.sh` and `.bash`.

    [] for a `#!` line with python, any other file, and one that cannot be read.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(256)
    except OSError:
        return []
    if line.startswith(b"#!"):
        words = line[2:].decode("utf-8", "replace").split()
        return [] if any("python" in word for word in words) else words
    if line.startswith((b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ")):
        return [str(path)]
    return ["sh"] if path.suffix in {".sh", ".bash"} else []

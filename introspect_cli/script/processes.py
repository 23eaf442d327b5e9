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


_LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "accelerate-launch", "deepspeed", "ds", "fabric", "lightning", "uv", "uvx"}
)
_LAUNCHER_MODULES = re.compile(
    r"(torch\.distributed\.(run|launch)|accelerate\.commands\.\w+|deepspeed\.launcher\.\w+|lightning\.fabric\.cli"
    r"|lightning_fabric\.cli)(\.__main__)?$"
)
_HELPERS = re.compile(r"(pip3?|ninja|cmake|tensorboard|jupyter(-\w+)?|wheel|virtualenv|pre-commit|ruff|mypy)$")
_HELPER_MODULES = re.compile(
    r"(pip|ensurepip|venv|setuptools|build|torch\._inductor|torch\.utils|triton|multiprocessing|joblib|tensorboard"
    r"|introspect_cli|wandb|ray)(\.|$)"
)
_HELPER_PATHS = re.compile(r"[/\\](site|dist)-packages[/\\](torch[/\\](_inductor|utils)|triton|joblib|wandb|ray)[/\\]")
_OWN_CODE = re.compile(r"\bmultiprocessing\.(spawn|forkserver)\b")
_HELPER_CODE = re.compile(r"\b(resource_tracker|semaphore_tracker|setuptools|torch\._inductor)\b")
_VALUED = "WX"


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
            if letter in "cm" or letter in _VALUED:
                before = (*words[: at - 1], *([word[: place - 1]] if place > 2 else []))
                value = word[place:] or (words[at] if at < len(words) else "")
                at += not word[place:]
                if letter == "c":
                    return Process(_role_of_code(value), args=tuple(words[at:]), code=value, interpreter=before)
                if letter == "m":
                    return Process(_role_of_module(value), module=value, args=tuple(words[at:]), interpreter=before)
                break
    before = tuple(words[:at])
    if at >= len(words) or words[at] == "-":
        return Process(Role.HELPER, interpreter=before)  # an interactive interpreter
    return Process(_role_of_script(words[at]), script=words[at], args=tuple(words[at + 1 :]), interpreter=before)


def _role_of_code(code: str) -> Role:
    """Role by what follows `-c`: HELPER for trackers and compilers, WORKER for `multiprocessing`'s, else SCRIPT."""
    if _HELPER_CODE.search(code):
        return Role.HELPER
    return Role.WORKER if _OWN_CODE.search(code) else Role.SCRIPT


def _role_of_module(module: str) -> Role:
    """LAUNCHER, HELPER or SCRIPT by the module's name."""
    if _LAUNCHER_MODULES.match(module):
        return Role.LAUNCHER
    return Role.HELPER if _HELPER_MODULES.match(module) else Role.SCRIPT


def _role_of_script(script: str) -> Role:
    """LAUNCHER, HELPER or SCRIPT by file name and path."""
    name = os.path.basename(script)  # noqa: PTH119 - text
    if name in _LAUNCHERS:
        return Role.LAUNCHER
    return Role.HELPER if _HELPERS.match(name) or _HELPER_PATHS.search(script) else Role.SCRIPT


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
        return [interpreter, "-m", *words] if _role_of_module(first) is Role.LAUNCHER else None
    path = Path(first)
    if path.is_file() or (path / "__main__.py").exists():
        if not path.is_file() or path.suffix in {".py", ".pyc", ".pyz", ".zip"}:
            return None
        shell = _interpreter_of(path)
        launcher = _role_of_script(first) is Role.LAUNCHER
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

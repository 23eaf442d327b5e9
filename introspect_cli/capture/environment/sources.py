"""Which code runs: the user's files and their commit, the installed packages, and where a class is defined.

Two runs that should agree often do not because a file changed. Files of the project are those under its root (the
git work tree that holds the script, else the script's own directory); imported files from elsewhere count, too, unless
they came with python or a package manager.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from introspect_cli.capture.environment import redact

_FOREIGN = tuple(
    {
        os.path.realpath(path) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    }
)
PACKAGE = os.path.realpath(Path(__file__).parents[2]) + os.sep
"""The directory of this package."""


def git(directory: str) -> dict[str, Any]:
    """`commit`, `branch`, `subject`, `dirty` and `changed` of a directory's work tree.

    `dirty` is whether a tracked file is changed, `changed` these files as git prints them, the first 200 by name.
    Credentials in branch and subject are replaced. To be called before the script starts. Git is run by its full path,
    since to find a program by name `subprocess` enters `warnings.catch_warnings`, after which warnings that the script
    has shown are shown again.

    Returns:
        {} outside of git, and where git is missing or fails.
    """
    program = shutil.which("git")
    if program is None:
        return {}

    def ask(*arguments: str) -> str | None:
        """Output of a git command without its last line breaks.

        None where git cannot be started, fails, or takes more than 10 seconds.
        """
        try:
            answer = subprocess.run(  # noqa: S603 - the user's own git with fixed arguments, no shell
                [program, "-C", directory, *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=10,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.rstrip("\n") if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = [line[3:] for line in (ask("status", "--porcelain", "--untracked-files=no") or "").splitlines()]
    return {
        "commit": commit,
        "branch": redact.without_credentials(ask("rev-parse", "--abbrev-ref", "HEAD") or ""),
        "subject": redact.without_credentials(ask("log", "-1", "--format=%s") or ""),
        "dirty": bool(changed),
        "changed": sorted(changed)[:200],
    }


_NAME_OR_VERSION = re.compile(r"^(Name|Version):[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)


def packages() -> dict[str, str]:
    """Versions of all installed distributions by name, sorted without regard to case.

    Of a name that comes twice the first one; "" for one without a version.
    """
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        # python's own parser takes each file apart whole, most of which is the README: eight times as long
        fields = dict(reversed(_NAME_OR_VERSION.findall(text.partition("\n\n")[0])))
        if fields.get("Name"):
            versions.setdefault(fields["Name"], fields.get("Version", ""))
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


class Project:
    """Root directory of the user's code; displayed paths are relative to it."""

    root = ""


def set_project(script_directory: str) -> None:
    """Set `Project.root`: the script's directory or the nearest above it that has `.git`, else the script's."""
    start = Path(os.path.realpath(script_directory))
    for directory in (start, *start.parents):
        if (directory / ".git").exists():
            Project.root = str(directory)
            return
    Project.root = str(start)


@functools.lru_cache(maxsize=1 << 14)
def is_users(path: str) -> bool:
    """Whether a file is the user's: outside python's directories, any `site-packages` and this package; cached.

    False for "" and for names like `<stdin>`. The file need not exist.
    """
    if not path or path.startswith("<"):
        return False
    real = _real_path(path)
    return not real.startswith((*_FOREIGN, PACKAGE)) and f"{os.sep}site-packages{os.sep}" not in real


def _real_path(path: str) -> str:
    """`os.path.realpath`, the directory's part cached: quick for thousands of files in some hundred directories."""
    directory, name = os.path.split(path)
    if not path.startswith(os.sep):
        return os.path.realpath(path)
    real = os.path.join(_real_directory(directory), name)  # noqa: PTH118 - compared as text
    return os.path.realpath(real) if name in {"", ".", ".."} or os.path.islink(real) else real  # noqa: PTH114 - as above


_real_directory = functools.lru_cache(maxsize=4096)(os.path.realpath)


def relative(path: str) -> str:
    """A path for display: relative to the project, else to `site-packages`, else to the longest entry of `sys.path`.

    The file's name alone where it is in none of them.
    """
    real = os.path.realpath(path)
    if Project.root and real.startswith(Project.root + os.sep):
        return os.path.relpath(real, Project.root)
    _, marker, rest = real.rpartition(f"{os.sep}site-packages{os.sep}")
    if marker:
        return rest
    places = [_real_directory(place) + os.sep for place in sys.path if isinstance(place, str)]
    found = max((place for place in places if real.startswith(place)), key=len, default="")
    return real[len(found) :] if found else Path(real).name


def attributes_of(value: object) -> dict[str, Any]:
    """An object's own `__dict__`, no copy, read past methods of its class; {} where it has none, or no plain dict."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def file_of(module: object) -> str:
    """A module's `__file__`, "" without one; read past the module's own methods, which may import or raise."""
    file = attributes_of(module).get("__file__")
    return file if type(file) is str else ""


def is_generated(path: str) -> bool:
    """Whether a file lies in a cache of Inductor or Triton: an environment variable's directory, or the usual one."""
    for cache in (os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR")):
        if cache and os.path.realpath(path).startswith(os.path.realpath(cache) + os.sep):
            return True
    return any(part == ".triton" or part.startswith("torchinductor_") for part in Path(path).parts)


def source_name(path: str, module: str) -> str:
    """A source file's name in a run: its path relative to the project, else by its module (`package/module.py`).

    Where no project is set, as `relative` has it.
    """
    if not Project.root or os.path.realpath(path).startswith(Project.root + os.sep):
        return relative(path)
    return module.replace(".", "/") + ".py"


def class_source(cls: type) -> str:
    """`file:line` of a class, relative to the project; without a line where that is unknown.

    "" where the class's module has no file. A class that is not in one of the user's files has its `forward`'s line, if
    any.
    """
    path = file_of(sys.modules.get(cls.__module__))
    if not path:
        return ""
    code = getattr(cls.__dict__.get("forward"), "__code__", None)
    return _defined_at(path, cls.__qualname__, getattr(code, "co_firstlineno", None), Project.root)


def has_forward_call(path: str) -> bool:
    """Whether a file of the user's contains `.forward` other than `super().forward`; False if unreadable."""
    return is_users(path) and any(re.search(rb"(?<!super\(\))\.forward\b", line) for line in _lines_of(path))


@functools.lru_cache(maxsize=1024)
def _defined_at(path: str, name: str, line_of_forward: int | None, _root: str) -> str:
    """`file:line` of a class in a file of the user's, else of its `forward`, else the file alone; cached.

    Where a file has several classes of a name, the line is that of the last one before the `forward`, or of the last
    one.

    Args:
        path: the file.
        name: the class's `__qualname__`.
        line_of_forward: where its `forward` begins; None where it has none of its own.
        _root: the project's root, which the displayed path depends on.
    """
    begins = re.compile(rb"\s*class\s+" + re.escape(name.rpartition(".")[2]).encode() + rb"\b")
    lines = _lines_of(path)[:line_of_forward] if is_users(path) else []
    line = max((number for number, text in enumerate(lines, 1) if begins.match(text)), default=line_of_forward)
    return relative(path) + (f":{line}" if line else "")


@functools.lru_cache(maxsize=64)
def _lines_of(path: str) -> list[bytes]:
    """Lines of a file, cached; [] where it cannot be read."""
    try:
        return Path(path).read_bytes().splitlines()
    except OSError:
        return []

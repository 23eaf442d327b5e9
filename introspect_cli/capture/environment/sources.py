"""The user's source files, and what else of the project and its packages decides what runs."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tokenize import detect_encoding
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.environment import redact
from introspect_cli.script.ending import places_of
from introspect_cli.script.processes import described
from introspect_cli.store.sources import LIMIT_FILE, LIMIT_RUN
from introspect_cli.sums import hex_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# ---
# Which code runs: the user's files and their commit, the installed packages, and where a class is defined.
#
# Two runs that should agree often do not because a file changed. Files of the project are those under its root (the
# git work tree that holds the script, else the script's own directory); imported files from elsewhere count, too,
# unless they came with python or a package manager.

_FOREIGN = tuple(
    {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
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
    if (program := shutil.which("git")) is None:
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

    if (commit := ask("rev-parse", "HEAD")) is None:
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
    Project.root = str(next((each for each in (start, *start.parents) if (each / ".git").exists()), start))


@functools.lru_cache(maxsize=1 << 14)
def is_users(path: str) -> bool:
    """Whether a file is the user's: outside python's directories, any `site-packages` and this package; cached.

    False for "" and for names like `<stdin>`. The file need not exist.
    """
    if not path or path.startswith("<"):
        return False
    if path.startswith(_STDLIB) and f"{os.sep}site-packages{os.sep}" not in path:
        return False  # Debian's `sitecustomize.py` is a link to /etc
    real = os.path.realpath(path)
    return not real.startswith((*_FOREIGN, PACKAGE)) and f"{os.sep}site-packages{os.sep}" not in real


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
    places = [os.path.realpath(place) + os.sep for place in sys.path if isinstance(place, str)]
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
    caches = filter(None, (os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR")))
    if os.path.realpath(path).startswith(tuple(os.path.realpath(cache) + os.sep for cache in caches)):
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
    if not (path := file_of(sys.modules.get(cls.__module__))):
        return ""
    forward = cls.__dict__.get("forward")
    code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)  # a capture may stand in for it
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


# ---
# The user's source files as they ran: their digests, and their text for as far as a run has room.
#
# A file may change while the script runs, so it is read as early as can be without an import hook: the script's text
# is that which was compiled, and what it imports is read when the first step is complete, and again whenever
# something new is there to be written. What was read first stands, and a file that is younger than the process is
# told. Only regular files are read, never a pipe or a device, and none that is larger than anybody writes by hand.

CODE, NOTEBOOK, STDIN = "-c", "<notebook>", "<stdin>"
"""Names of code that no file held: that of `python -c`, the cells of a notebook, what python read from its input."""
_LARGEST = 8 << 20
"""Bytes of a file that is digested."""
_LEFT_OUT = (
    f"the text of {{}} is not kept: a run keeps at most {LIMIT_FILE >> 20} MB of a file and {LIMIT_RUN >> 20} MB of "
    "all files"
)
_UNREAD = (
    f"{{}} cannot be read, being larger than {_LARGEST >> 20} MB or gone since it was imported: whether it is the same "
    "in another run is not known"
)
_YOUNGER = "{} changed after the script began: what is recorded may not be what ran"


class Texts:
    """Keeps texts of files in a run, without secrets and each content once, as far as there is room."""

    def __init__(self, keep: Callable[[str, bytes], None] | None, patterns: tuple[str, ...], room: int) -> None:
        """Keep nothing yet.

        Args:
            keep: takes the digest and the text of a file; None where no text is wanted.
            patterns: globs over names whose values are secret.
            room: bytes of all texts.
        """
        self._keep, self._patterns, self._room = keep, patterns, room
        self._kept: set[str] = set()

    def add(self, digest: str, data: bytes, redacted: Callable[[str, tuple[str, ...]], str]) -> bool:
        """Keep the text of a file; nothing for a binary one, or one that is not in its encoding.

        False where it is above the limit of a file or of all.

        Args:
            digest: of the file's content.
            data: the content.
            redacted: gives a text without secrets, of which names match patterns.
        """
        if self._keep is None or digest in self._kept or b"\0" in data:
            return True
        if len(data) > min(LIMIT_FILE, self._room):
            return False
        try:
            encoding = detect_encoding(BytesIO(data).readline)[0]
            text = data.decode(encoding)
        except (SyntaxError, UnicodeError, LookupError):
            return True
        clean = redacted(text, self._patterns)
        self._keep(digest, data if clean == text else clean.encode(encoding, "surrogateescape"))
        self._kept.add(digest)
        self._room -= len(data)
        return True


class SourceFiles:
    """Reads source files, each once.

    Attributes:
        digests: of what was read, by name.
    """

    def __init__(self, texts: Texts, began: float) -> None:
        """Read nothing yet.

        Args:
            texts: keeps the text of each file.
            began: when the process began, as the clock of the file system counts.
        """
        self.digests: dict[str, str] = {}
        self._texts = texts
        self._began = began
        self._seen: set[str] = set()
        self._told: dict[str, list[str]] = {_LEFT_OUT: [], _UNREAD: [], _YOUNGER: []}

    def add(self, name: str, data: bytes) -> None:
        """Note the digest of a file's content, and have its text kept.

        Nothing if the name was added before: the first content stands.

        Args:
            name: of the file in the run.
            data: its content.
        """
        if name not in self.digests:
            self.digests[name] = digest = hex_digest(data)
            if not self._texts.add(digest, data, redact.source):
                self._told[_LEFT_OUT].append(name)

    def read_imports(self, raised: BaseException | None = None) -> bool:
        """Read the user's files that were imported since the last call, and a `__main__` without a file.

        Files that cannot be read, or changed after the process began, are noted for `notes`.

        Args:
            raised: what ended the script. Its files are read, too: of a module whose import fails python keeps nothing.

        Returns:
            Whether any file was added.
        """
        before = len(self.digests)
        for name, path in self._new_imports(raised):
            if (read := _read_regular(path)) is not None:
                data, changed = read
                if changed > self._began and name not in self.digests:
                    self._told[_YOUNGER].append(name)
                self.add(name, data)
            elif path.endswith(".py") and os.path.isdir(os.path.dirname(path)):  # noqa: PTH112, PTH120 - text; none is in an archive
                self._told[_UNREAD].append(name)
        for name, text in _main_without_file():
            self.add(name, text.encode("utf-8", "surrogatepass"))
        return len(self.digests) > before

    def _new_imports(self, raised: BaseException | None) -> list[tuple[str, str]]:
        """Name and path of each source file of the user's imported since the last call; not those of compilers' caches.

        Those of the project come first: all others may then use up the run's limit. So are those that `raised` came
        through, or that do not compile.
        """
        found, root = [], Project.root + os.sep
        held = [(module, file_of(thing)) for module, thing in list(sys.modules.items())]
        held += [(place.module, place.path) for place in places_of(raised)] if raised is not None else []
        for module, path in held:
            if path not in self._seen and is_users(path) and not is_generated(path):
                found.append((source_name(path, module), path))
            self._seen.add(path)
        return sorted(found, key=lambda item: (not os.path.realpath(item[1]).startswith(root), item[0]))

    def notes(self) -> list[str]:
        """Sentences on texts left out for size, on unreadable files, and on files changed since the process began."""
        told = {sentence: ", ".join(names[:3]) + ", ..." * (len(names) > 3) for sentence, names in self._told.items()}
        return [sentence.format(names) for sentence, names in told.items() if names]


def _read_regular(path: str) -> tuple[bytes, float] | None:
    """Bytes of a regular file of at most 8 MiB, and when it changed; None for any other: no pipe is waited for."""
    with suppress(OSError, ValueError):
        status = os.stat(path)  # noqa: PTH116 - text is what is at hand
        if stat.S_ISREG(status.st_mode):
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                data = file.read(_LARGEST + 1)
            return (data, status.st_mtime) if len(data) <= _LARGEST else None
    return None


def _main_without_file() -> Iterator[tuple[str, str]]:
    """At most one pair: name and text of a `__main__` without a file (`python -c`, a notebook's cells, standard input).

    No pair where `__main__` has a file, for an input that is a pipe, which cannot be read again, and for an interactive
    python.
    """
    main = sys.modules.get("__main__")
    if main is None or file_of(main) not in {"", STDIN}:
        return
    names = attributes_of(main)
    cells = names.get("In")
    if "get_ipython" in names and isinstance(cells, list):
        texts = [(number, cell) for number, cell in enumerate(list(cells)) if type(cell) is str and cell]
        yield NOTEBOOK, "".join(f"# cell {number}\n{text.rstrip()}\n\n" for number, text in texts)
    elif (code := described(sys.orig_argv).code) is not None:
        yield CODE, code
    elif not sys.flags.interactive and (read := _read_regular("/proc/self/fd/0")) is not None:
        yield STDIN, read[0].decode("utf-8", "surrogateescape")

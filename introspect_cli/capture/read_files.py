"""The files that a script opens to read: configuration with its text, all others by path, size and digest.

An argument is equal and the file that it names is another: no setting says so. Python's own readers, yaml, json, numpy
and torch all come by `open`, so it is replaced for as long as a capture lasts, from before the script's first line on.
What was opened is read through the descriptor that the script has, at places of our own choice, so that its position
stays and no second file can be meant; for what opens files past `open`, see `file_readers`. Only regular files are read
that were there before the script began; of a data set of thousands of files one line is kept.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from introspect_cli.capture.environment import redact, redact_files, sources
from introspect_cli.capture.file_readers import Readers
from introspect_cli.capture.frames import Places
from introspect_cli.capture.guard import Patches, uncounted
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from introspect_cli.capture.guard import Guard

CONFIG: Final = frozenset(
    {
        ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".gin", ".properties", ".jsonnet", ".libsonnet",
        ".json5", ".jsonc", ".hocon", ".py", ".args", ".xml",
    }
)  # fmt: skip
"""Endings of files whose text is kept."""
_SMALL_TEXT: Final = frozenset({".txt", ""})
_SMALL: Final = 1 << 16

_LONGEST_TEXT = 1 << 18
"""Bytes of a file whose text is kept: what is longer nobody wrote by hand."""
_MOST_TEXTS = 50
_MOST_TEXT = 2 << 20
_MOST_FILES = 200
_MOST_OF_A_LINE = 16
"""Files of one ending that one line of the script opens; where it opens more, they are a data set."""
_MOST_OPENED = 20_000
"""Files after which nothing is looked at any more."""
_WHOLE = 16 << 20
_BLOCK, _BLOCKS = 1 << 16, 64
_MOST_BYTES = 1 << 30
"""Bytes that are read of all files."""

_SYSTEM = (
    "/proc/",
    "/sys/",
    "/dev/",
    "/etc/",
    "/usr/lib/",
    "/usr/lib64/",
    "/usr/share/",
    "/lib/",
    "/run/",
    "/var/lib/",
)
_PYTHON = tuple(
    {
        f"{os.path.realpath(prefix)}{os.sep}{name}{os.sep}"
        for prefix in (sys.prefix, sys.base_prefix)
        for name in ("lib", "share", "etc", "bin")
    }
)
_SECRET = frozenset(
    {".env", ".netrc", ".pem", ".key", ".p12", ".pfx", ".pgpass", "credentials", "token", "id_rsa", "id_ed25519"}
)
_open = os.open
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedRandom, io.FileIO)


class ReadFiles:
    """Notes files that the script reads.

    Attributes:
        changed: whether `document` is another than when it was last written.
    """

    def __init__(self, guard: Guard, directory: Path, patterns: tuple[str, ...], *, texts: bool) -> None:
        """Watch nothing yet.

        Args:
            guard: what catches a mistake.
            directory: of the run; what is in it is not the script's.
            patterns: globs over names whose values are secret.
            texts: whether the text of configuration files is kept.
        """
        self.changed = False
        self._guard = guard
        self.guarded = self._guarded = guard.around("files", "files that the script reads are")
        self._directory = os.path.realpath(directory) + os.sep
        self._start = os.path.realpath(Path.cwd()) + os.sep
        self._patterns, self._texts = patterns, texts
        self._began = time.time()
        self._lock = threading.Lock()
        self._patches, self._places = Patches(), Places()
        self._open: Callable[..., Any] = builtins.open
        self._seen: set[tuple[int, ...]] = set()
        self._files: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, tuple[str, bytes]] = {}  # digests and texts of some, to be handed out
        self._of_line: dict[tuple[str, str], list[str]] = {}
        self._many: dict[tuple[str, str], str] = {}
        self._opened = self._bytes = self._text = 0
        self._kept: set[str] = set()
        self._left_out = False
        self._readers = Readers(self)

    def install(self) -> None:
        """Replace `open` in builtins and io, and the readers of libraries."""
        self._open = builtins.open
        uncounted(ReadFiles.open)
        for module in (builtins, io):
            self._patches.replace(module, "open", self.open)
        self._readers.install()
        self._guarded.on = True

    def remove(self) -> None:
        """Put the functions back."""
        self._guarded.on = False
        self._readers.remove()
        self._patches.remove()

    def open(self, *args: Any, **kwargs: Any) -> Any:
        """Replacement for python's `open`; notes the file."""
        handle = self._open(*args, **kwargs)
        if self._guarded.on and not self._guard.sections.depth:
            with self._guarded:
                self._opened_by(sys._getframe(1), handle, args, kwargs)  # noqa: SLF001 - as python documents it
        return handle

    def _opened_by(self, frame: FrameType, handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a handle of python's own that was opened by path and for reading."""
        mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
        if type(handle) not in _FILES or type(mode) is not str or not {"w", "a", "x"}.isdisjoint(mode):
            return
        given = args[0] if args else kwargs.get("file")
        if type(given) is not int:
            name = handle.name
            self.read(
                frame, handle.fileno(), name if type(name) is str else os.fsdecode(name) if type(name) is bytes else ""
            )

    def read(self, frame: FrameType | None, descriptor: int, path: str) -> None:
        """Note an open regular file older than the run.

        More than 16 files of one line and ending (48 of `CONFIG`) become one entry.
        """
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode) or not path or key in self._seen:
            return
        ending = os.path.splitext(path)[1].lower()  # noqa: PTH122 - text is what is at hand
        line = self._places.line(frame, through=True)
        if (line, ending) in self._many:
            return
        self._opened += 1
        if self._opened > _MOST_OPENED:
            self._guarded.on, self._left_out = False, True
            return
        if status.st_mtime >= self._began:
            return  # made by the script
        shown, real = os.path.abspath(path), os.path.realpath(path)  # noqa: PTH100 - as above; a cache links to digests
        if not (self._is_watched(real) and self._is_watched(shown)):
            return
        with self._lock:
            self.changed = True
            if len(self._files) >= _MOST_FILES:
                self._left_out = True
                return
            self._seen.add(key)
            name = self._named(shown, real)
            of_line = self._of_line.setdefault((line, ending), [])
            of_line.append(name)
            if len(of_line) > _MOST_OF_A_LINE * (3 if ending in CONFIG else 1):
                folders = [os.path.dirname(file) or "." for file in of_line]  # noqa: PTH120 - as above
                alike = len({folder.startswith(os.sep) for folder in folders}) == 1
                self._many[line, ending] = (os.path.commonpath(folders) if alike else "") or "."
                for file in of_line:
                    self._files.pop(file, None)
                    self._waiting.pop(file, None)
                return
            about = self._look(name, descriptor, status.st_size, ending)
            self._files[name] = about | ({"line": line} if line else {})

    def _is_watched(self, real: str) -> bool:
        """Whether a path is none of the system's, python's, a package's or the run's, and not secret by name."""
        if real.startswith((*_SYSTEM, *_PYTHON, self._directory)) or not sources.is_users(real):
            return False
        name = os.path.basename(real)  # noqa: PTH119 - as above
        stem, ending = os.path.splitext(name)  # noqa: PTH122 - as above
        secret = ending.lower() in _SECRET or name.lower() in _SECRET or redact.is_secret_name(stem, self._patterns)
        return not secret and ending not in {".pyc", ".so"} and not sources.is_generated(real)

    def _look(self, name: str, descriptor: int, size: int, ending: str) -> dict[str, Any]:
        """Size and digest of a file; keeps the text of small configuration files.

        Above 16 MiB, 64 blocks are sampled.
        """
        small = size <= (_LONGEST_TEXT if ending in CONFIG else _SMALL)
        if self._texts and small and (ending in CONFIG or ending in _SMALL_TEXT) and len(self._kept) < _MOST_TEXTS:
            data = os.pread(descriptor, size, 0)
            text = _decoded(data)
            if text is not None and self._text + len(data) <= _MOST_TEXT:
                self._text += len(data)
                clean = redact_files.config(text, self._patterns)
                digest = source_digest(data)
                self._kept.add(digest)
                self._waiting[name] = digest, data if clean == text else clean.encode("utf-8", "backslashreplace")
                return {"size": size, "digest": digest}
        sampled = size > _WHOLE
        needed = _BLOCK * _BLOCKS if sampled else size
        if self._bytes + needed > _MOST_BYTES:
            return {"size": size}
        self._bytes += needed
        digest = _digest(descriptor, size, sampled=sampled)
        return {"size": size, "digest": digest, **({"sampled": True} if sampled else {})}

    def _named(self, shown: str, real: str) -> str:
        """A path relative to the project or the start directory, else with `~`, else absolute."""
        for path in (shown, real):
            for root in (sources.Project.root + os.sep, self._start):
                if len(root) > 1 and path.startswith(root):
                    return path[len(root) :]
        home = os.path.expanduser("~") + os.sep  # noqa: PTH111 - as above
        return f"~/{shown[len(home) :]}" if len(home) > 2 and shown.startswith(home) else shown

    def path(self, frame: FrameType, path: object) -> None:
        """Note a file that a library has opened by path."""
        if type(path) is not str and not isinstance(path, Path):
            return
        descriptor = _open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.read(frame, descriptor, str(path))
        finally:
            os.close(descriptor)

    @property
    def is_on(self) -> bool:
        """Whether the script is running, and no code of introspect."""
        return self._guarded.on and not self._guard.sections.depth

    @property
    def document(self) -> dict[str, dict[str, Any]]:
        """Size, digest and line by file name: the document `settings/files`."""
        with self._lock:
            files = dict(sorted(self._files.items()))
            many = {
                f"{place}/*{ending}": {"many": True, **({"line": line} if line else {})}
                for (line, ending), place in self._many.items()
            }
        return {**files, **many, **({"(others)": {"many": True}} if self._left_out else {})}

    def texts(self) -> list[tuple[str, bytes]]:
        """Digest and text of configuration files, each returned once."""
        with self._lock:
            texts = list(self._waiting.values())
            self._waiting.clear()
        return texts


def _decoded(data: bytes) -> str | None:
    """A file as UTF-8 text; None for a binary one."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _digest(descriptor: int, size: int, *, sampled: bool) -> str:
    """Digest of a file, or of 64 blocks spread evenly over it if `sampled`."""
    digest = hashlib.blake2b(digest_size=8)
    step = (size - _BLOCK) / (_BLOCKS - 1) if sampled else _BLOCK
    places = [int(number * step) for number in range(_BLOCKS)] if sampled else range(0, size, _BLOCK)
    for place in places:
        digest.update(os.pread(descriptor, _BLOCK, place))
    return digest.hexdigest()

"""The files that a script opens to read: configuration with its text, all others by path, size and digest.

An argument is equal and the file that it names is another: no setting says so. Python's own readers, yaml, json, numpy
and torch all come by `open`, so it is replaced for as long as a capture lasts, from before the script's first line on.
What was opened is read through the descriptor that the script has, at places of our own choice, so that its position
stays and no second file can be meant; libraries that open files in C are watched where scripts call them. Only regular
files are read that were there before the script began; of a data set of thousands of files one line is kept.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from introspect_cli.capture.environment import redact, sources
from introspect_cli.capture.events import Patches
from introspect_cli.capture.frames import line_of
from introspect_cli.capture.guard import in_section, uncounted
from introspect_cli.sums import hex_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from introspect_cli.capture.capture import Capture
    from introspect_cli.capture.events import Call

_CONFIG = (
    ".yaml .yml .json .toml .ini .cfg .conf .gin .properties .jsonnet .libsonnet .json5 .jsonc .hocon .py .args .xml"
)
_LONGEST: Final = dict.fromkeys(_CONFIG.split(), 1 << 18) | {".txt": 1 << 16, "": 1 << 16}
"""Bytes of a file whose text is kept, by ending: what is longer nobody wrote by hand."""
MAX_TEXT_BYTES = 2 << 20
MAX_FILES = 200
MAX_FILES_OF_LINE = 48
"""Files of one ending that one line of the script opens; where it opens more, they are a data set."""
_WHOLE = 16 << 20
_BLOCK, _BLOCKS = 1 << 16, 64
MAX_READ_BYTES = 1 << 30
"""Bytes that are read of all files."""

_SYSTEM = (
    "/proc/", "/sys/", "/dev/", "/etc/", "/usr/lib/", "/usr/lib64/", "/usr/share/", "/lib/", "/run/", "/var/lib/",
)  # fmt: skip
_PREFIXES = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
_PYTHON = tuple(f"{prefix}/{name}/" for prefix in _PREFIXES for name in ("lib", "share", "etc", "bin"))
_SECRET = frozenset(
    {".env", ".netrc", ".pem", ".key", ".p12", ".pfx", ".pgpass", "credentials", "token", "id_rsa", "id_ed25519"}
)
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedRandom, io.FileIO)


class ReadFiles:
    """Notes files that the script reads."""

    def __init__(self, capture: Capture, texts: sources.Texts) -> None:
        """Open and replace nothing yet.

        Args:
            capture: files of its run are not noted; `document` is put among its facts under `files` when it changes.
            texts: keeps the text of small configuration files.
        """
        self._facts, self._is_wanted = capture.facts, capture.options.source
        self.guarded = capture.guard.around("files", "files that the script reads are")
        self._directory = os.path.realpath(capture.store.path) + os.sep
        self._start = os.path.realpath(Path.cwd()) + os.sep
        self._patterns, self._texts = capture.options.redact, texts
        self._began = time.time()
        self._lock = threading.RLock()  # an interrupt may leave it held, see `Interner.rest`
        self._patches = Patches()
        self._original: Callable[..., Any] = open
        self._opener = self._open  # one object, as `builtins.open` and `io.open` are
        self._seen: set[tuple[int, ...]] = set()
        self._files: dict[str, dict[str, Any]] = {}
        self._of_line: dict[tuple[str, str], list[str]] = {}
        self._folders: dict[str, dict[str, Any]] = {}
        self._bytes = 0
        self._left_out = False

    def install(self) -> None:
        """Replace `open` in builtins and io now, and the readers of libraries when the script has imported these.

        Nothing where no sources are recorded.
        """
        if self._is_wanted:
            with self.guarded:
                self._patches.put("files", self, self.guarded)
            self.guarded.on = True

    def remove(self) -> None:
        """Put `open` and the readers back; what was noted stays."""
        self.guarded.on = False
        self._patches.remove()

    def opener(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement of `open`, the same for both modules that have it; it calls `original`."""
        uncounted(ReadFiles._open)
        self._original = original
        return self._opener

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        """Open a file as python would, and note it if the script has opened it, not introspect."""
        handle = self._original(*args, **kwargs)
        if self.guarded.on and not in_section():
            with self.guarded, contextlib.suppress(OSError):  # gone already, or named from another directory
                if type(handle) in _FILES and handle.readable() and type(handle.name) in {str, bytes}:
                    self._note_path(sys._getframe(1), os.fsdecode(handle.name))  # noqa: SLF001 - as python documents it
        return handle

    def watch_library_read(self, call: Call) -> Callable[[object], None]:
        """Called before a library opens files in C; returns what notes them once that is done.

        Of a directory the first 49 files by name are looked at.
        """
        given = next(iter((*call.args[call.name == "__init__" :], *call.kwargs.values())), "")

        def opened(_: object) -> None:
            """Note each file given by path, alone or in a list or tuple; of a directory the first 49 files by name."""
            for path in given if type(given) in {list, tuple} else [given]:
                if type(path) is str or isinstance(path, Path):
                    inside = sorted(Path(path).iterdir()) if Path(path).is_dir() else [path]
                    for file in inside[: MAX_FILES_OF_LINE + 1]:
                        self._note_path(call.frame, str(file))

        return opened

    def _note_path(self, frame: FrameType | None, path: str) -> None:
        """Note a file that was opened, each once: name, size, digest, and the line that did; sets `facts["files"]`.

        Only regular files that `_is_watched` accepts and that were not written since the run began, 200 in all. Where
        one line opens more than 48 of one ending, one entry for their folder takes the place of all of them.

        Args:
            frame: of whoever opened it; the line is that of the innermost frame of the user's.
            path: as the script named it.
        """
        status = os.stat(path)  # noqa: PTH116 - text is what is at hand
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode) or key in self._seen:
            return
        ending = os.path.splitext(path)[1].lower()  # noqa: PTH122 - as above
        line = line_of(frame, through=True)
        is_many = len(self._of_line.get((line, ending), ())) > MAX_FILES_OF_LINE
        if is_many or status.st_mtime >= self._began:
            return  # of a data set, or made by the script
        shown, real = os.path.abspath(path), os.path.realpath(path)  # noqa: PTH100 - as above; a cache links to digests
        if not (self._is_watched(real) and self._is_watched(shown)):
            return
        with self._lock:
            self._facts["files"] = self.document
            if len(self._files) >= MAX_FILES:
                self._left_out = True
                return
            self._seen.add(key)
            name, at = self._shown_name(shown, real), {"line": line} if line else {}
            of_line = self._of_line.setdefault((line, ending), [])
            of_line.append(name)
            if len(of_line) > MAX_FILES_OF_LINE:
                folder = os.path.commonprefix(of_line).rpartition("/")[0] or "."  # noqa: RUF071 - cut at a slash
                self._folders[f"{folder}/*{ending}"] = {"many": True, **at}
                self._files = {file: about for file, about in self._files.items() if file not in of_line}
            else:
                self._files[name] = self._describe(path, status.st_size, ending) | at

    def _is_watched(self, real: str) -> bool:
        """Whether to note a path: not the system's, python's, a package's or the run's, and not secret by name."""
        if real.startswith((*_SYSTEM, *_PYTHON, self._directory)) or not sources.is_users(real):
            return False
        name = os.path.basename(real)  # noqa: PTH119 - as above
        stem, ending = os.path.splitext(name)  # noqa: PTH122 - as above
        secret = ending.lower() in _SECRET or name.lower() in _SECRET or redact.is_secret_name(stem, self._patterns)
        return not secret and ending not in {".pyc", ".so"} and not sources.is_generated(real)

    def _describe(self, path: str, size: int, ending: str) -> dict[str, Any]:
        """Size and digest of a file, and `sampled` where only 64 blocks of a file above 16 MiB were read.

        The digest is missing once 1 GiB was read in all. The text is kept of files up to the size that
        `_LONGEST` has for their ending: 2 MiB at most.
        """
        sampled = size > _WHOLE
        needed = _BLOCK * _BLOCKS if sampled else size
        if self._bytes + needed > MAX_READ_BYTES:
            return {"size": size}
        self._bytes += needed
        step = (size - _BLOCK) / (_BLOCKS - 1) if sampled else _BLOCK
        places = [int(number * step) for number in range(_BLOCKS)] if sampled else range(0, size, _BLOCK)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = b"".join(os.pread(descriptor, _BLOCK, place) for place in places)
        finally:
            os.close(descriptor)
        digest = hex_digest(data)
        if size <= _LONGEST.get(ending, -1):
            self._texts.add(digest, data, redact.source if ending == ".py" else redact.config)
        return {"size": size, "digest": digest, **({"sampled": True} if sampled else {})}

    def _shown_name(self, shown: str, real: str) -> str:
        """Name of a file in the document: relative to project or start directory, else below `~`, else absolute.

        Args:
            shown: absolute path as the script wrote it.
            real: the same with links resolved.
        """
        for path in (shown, real):
            for root in (sources.Project.root + os.sep, self._start):
                if len(root) > 1 and path.startswith(root):
                    return path[len(root) :]
        home = os.path.expanduser("~") + os.sep  # noqa: PTH111 - as above
        return f"~/{shown[len(home) :]}" if len(home) > 2 and shown.startswith(home) else shown

    def document(self) -> dict[str, dict[str, Any]]:
        """The document `settings/files`: size, digest and line by file name, sorted.

        Then `many` for each folder of files, by `folder/*.ending`; last, if files were left out, `(others)`. Digest and
        line may be missing.
        """
        with self._lock:
            others: dict[str, dict[str, Any]] = {"(others)": {"many": True}} if self._left_out else {}
            return dict(sorted(self._files.items())) | self._folders | others

"""The user's source files as they ran: their digests, and their text for as far as a run has room.

A file may change while the script runs, so it is read as early as can be without an import hook: the script's
text is that which was compiled, and what it imports is read when the first step is complete, and again whenever
something new is there to be written. What was read first stands, and a file that is younger than the process is told.
Only regular files are read, never a pipe or a device, and none that is larger than anybody writes by hand.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from introspect_cli.capture.environment import redact, sources
from introspect_cli.capture.processes import described
from introspect_cli.store.sources import LIMIT_FILE, LIMIT_RUN
from introspect_cli.sums import source_digest
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CODE, NOTEBOOK, STDIN = "-c", "<notebook>", "<stdin>"
"""Names of code that no file held: that of `python -c`, the cells of a notebook, what python read from its input."""
_LARGEST = 8 << 20
"""Bytes of a file that is digested."""
_SHOWN = 3


class SourceFiles:
    """Reads source files, each once.

    Attributes:
        digests: of what was read, by name.
    """

    def __init__(self, keep: Callable[[str, bytes], None] | None, patterns: tuple[str, ...], began: float) -> None:
        """Read nothing yet.

        Args:
            keep: takes the digest and the text of a file; None where no text is wanted.
            patterns: globs over names whose values are secret.
            began: when the process began, as the clock of the file system counts.
        """
        self.digests: dict[str, str] = {}
        self._keep = keep
        self._patterns = patterns
        self._began = began
        self._seen: set[str] = set()
        self._bytes = 0
        self._kept: set[str] = set()
        self._left_out: list[str] = []
        self._younger: list[str] = []
        self._unread: list[str] = []

    def add(self, name: str, data: bytes) -> None:
        """Note the digest of a file's content, and have its text kept, unless one of the same content was.

        Nothing if the name was added before: the first content stands.

        Args:
            name: of the file in the run.
            data: its content.
        """
        if name not in self.digests:
            self.digests[name] = digest = source_digest(data)
            if self._keep is not None and digest not in self._kept:
                self._keep_text(name, digest, data)

    def read_imports(self) -> bool:
        """Read the user's files that were imported since the last call, and a `__main__` without a file.

        Files that cannot be read, or changed after the process began, are noted for `notes`.

        Returns:
            Whether any file was added.
        """
        before = len(self.digests)
        for name, path in _project_first(_unseen_imports(self._seen)):
            status, data = _read_regular(path)
            if data is not None and status is not None:
                if status.st_mtime > self._began and name not in self.digests and not _is_as_compiled(path, status):
                    self._younger.append(name)
                self.add(name, data)
            elif os.path.isabs(path) and path.endswith(".py") and _is_or_was_file(path):  # noqa: PTH117 - text is at hand
                self._unread.append(name)
        for name, text in _main_without_file():
            self.add(name, text.encode("utf-8", "surrogatepass"))
        return len(self.digests) > before

    def notes(self) -> list[str]:
        """Sentences on texts left out for size, on unreadable files, and on files changed since the process began."""
        sentences = []
        if self._left_out:
            sentences.append(
                f"the text of {_head_of(self._left_out)} is not kept: a run keeps at most {LIMIT_FILE >> 20} MB of a "
                f"file and {LIMIT_RUN >> 20} MB of all files"
            )
        if self._unread:
            sentences.append(
                f"{_head_of(self._unread)} cannot be read, being larger than {_LARGEST >> 20} MB or gone since it "
                "was imported: whether it is the same in another run is not known"
            )
        if self._younger:
            sentences.append(
                f"{_head_of(self._younger)} changed after the script began: what is recorded may not be what ran"
            )
        return sentences

    def _keep_text(self, name: str, digest: str, data: bytes) -> None:
        """Hand a file's text, without secrets, to `keep`; nothing for a binary file.

        Where it is above the limit of a file or of all files, only its name is noted.
        """
        assert self._keep is not None
        text, encoding = _decoded(data)
        if text is None:
            return
        if len(data) > LIMIT_FILE or self._bytes + len(data) > LIMIT_RUN:
            self._left_out.append(name)
            return
        clean = redact.source(text, self._patterns)
        self._keep(digest, data if clean == text else clean.encode(encoding, "surrogateescape"))
        self._kept.add(digest)
        self._bytes += len(data)


def _head_of(names: list[str]) -> str:
    """The first 3 names, then how many more there are: `a.py, b.py, c.py and 2 files more`."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {count(rest, 'file')} more" if rest > 0 else "")


def _decoded(data: bytes) -> tuple[str | None, str]:
    """Text and encoding of a source file; None and "" for a binary one or one that is not in its encoding.

    Both are "" for a text that is larger than the limit of a file.
    """
    from io import BytesIO
    from tokenize import detect_encoding

    if len(data) > LIMIT_FILE:
        return ("", "") if b"\0" not in data[:LIMIT_FILE] else (None, "")
    with suppress(SyntaxError, UnicodeError, LookupError):
        encoding = detect_encoding(BytesIO(data).readline)[0]
        text = data.decode(encoding)
        return (text, encoding) if "\0" not in text else (None, "")
    return None, ""


def _read_regular(path: str) -> tuple[os.stat_result | None, bytes | None]:
    """Status and bytes of a regular file of at most 8 MiB; a pipe or a device is never waited for.

    Both are None where it cannot be read, is no regular file or is larger; only the bytes where it grew while it was
    read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None, None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return None, None
        data = b""
        while len(data) <= _LARGEST and (piece := os.read(fd, _LARGEST + 1)):
            data += piece
        return status, data if len(data) <= _LARGEST else None
    except OSError:
        return None, None
    finally:
        os.close(fd)


def _is_or_was_file(path: str) -> bool:
    """Whether a path is a regular file, or gone from a directory that is there; False for a path in an archive."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - text is what is at hand
    except OSError:
        return os.path.isdir(os.path.dirname(path))  # noqa: PTH112, PTH120 - as above


def _is_as_compiled(path: str, status: os.stat_result) -> bool:
    """Whether python's `.pyc` of a file was compiled from it as it is now, by time of change and size."""
    from importlib.util import cache_from_source

    try:
        _, data = _read_regular(cache_from_source(path))
    except (NotImplementedError, ValueError):
        return False
    word = 2**32
    expected = (0, int(status.st_mtime) % word, status.st_size % word)
    return data is not None and struct.unpack("<III", data[4:16].ljust(12)) == expected


def _unseen_imports(seen: set[str]) -> Iterator[tuple[str, str]]:
    """Name and path of each imported source file of the user's that is not in `seen`; not those of compilers' caches.

    The paths of all imported modules are added to `seen`.
    """
    for module, thing in list(sys.modules.items()):
        path = sources.file_of(thing)
        if path in seen:
            continue
        if sources.is_users(path) and not sources.is_generated(path):
            yield sources.source_name(path, module), path
        seen.add(path)


def _project_first(files: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    """Files sorted by name, those of the project first: all others may then use up the run's limit."""
    root = sources.Project.root + os.sep
    return sorted(files, key=lambda item: (not os.path.realpath(item[1]).startswith(root), item[0]))


def _main_without_file() -> Iterator[tuple[str, str]]:
    """At most one pair: name and text of a `__main__` without a file (`python -c`, a notebook's cells, standard input).

    No pair where `__main__` has a file, for an input that is a pipe, which cannot be read again, and for an interactive
    python.
    """
    main = sys.modules.get("__main__")
    if main is None or sources.file_of(main) not in {"", STDIN}:
        return
    names = sources.attributes_of(main)
    cells = names.get("In")
    if "get_ipython" in names and isinstance(cells, list):
        texts = [(number, cell) for number, cell in enumerate(list(cells)) if type(cell) is str and cell]
        yield NOTEBOOK, "".join(f"# cell {number}\n{text.rstrip()}\n\n" for number, text in texts)
    elif (code := described(sys.orig_argv).code) is not None:
        yield CODE, code
    elif not sys.flags.interactive and (data := _read_regular("/proc/self/fd/0")[1]) is not None:
        yield STDIN, data.decode("utf-8", "surrogateescape")

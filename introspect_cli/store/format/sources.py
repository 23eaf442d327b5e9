"""The text of the source files that a run was made of: files under `sources/`, compressed, named by what they held.

That a file changed is told by its digest; what changed in it only by its text, and by the time somebody asks, the file
may be another one or gone. So a run keeps the text, each file once, compressed, under the digest by which
`settings/sources.yaml` names it. Secrets were taken out before: a text whose own digest is not that of its name is
not all that the file held. A store may be a stranger's: names that lead out of a directory are left out, and no file is
unpacked beyond the limit.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from introspect_cli.store.files.folders import SOURCES, DamageError
from introspect_cli.sums import source_digest

if TYPE_CHECKING:
    from introspect_cli.store.files.folders import Directory

    class Run(Protocol):
        """What is asked of a run."""

        @property
        def settings(self) -> Mapping[str, Any]:
            """Its settings documents, by name."""

        @property
        def kept_sources(self) -> frozenset[str]:
            """Digests of the source files whose text is kept."""

        def source(self, digest: str) -> bytes | None:
            """A source file by the digest of what it held; None where its text is not kept."""


_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Source:
    """A source file of a run.

    Attributes:
        name: its path in the project, or that of its module where it lay elsewhere; `-c` and `<notebook>` for code that
            no file held.
        digest: of what it held when it was read.
        data: what it held, without secrets.
    """

    name: str
    digest: str
    data: bytes

    @property
    def exact(self) -> bool:
        """Whether this is all that the file held: no secret was taken out."""
        return source_digest(self.data) == self.digest

    @property
    def text(self) -> str:
        """The file as text; its encoding is the one that it declares."""
        from importlib.util import decode_source

        try:
            return decode_source(self.data)
        except (SyntaxError, UnicodeDecodeError):
            return self.data.decode("utf-8", "replace")


class Sources(Mapping[str, Source]):
    """The source files of a run whose text it keeps, by name, each read when asked for."""

    def __init__(self, run: Run) -> None:
        listed = run.settings.get("sources")
        self._run = run
        self.digests: dict[str, str] = {}
        """Digest by name of all source files, whether their text is there or not."""
        if isinstance(listed, Mapping):
            self.digests = {
                name: digest
                for name, digest in listed.items()
                if isinstance(name, str)
                and isinstance(digest, str)
                and _DIGEST.fullmatch(digest)
                and _stays_inside(name)
            }
        kept = run.kept_sources if self.digests else frozenset()
        self._names = [name for name, digest in self.digests.items() if digest in kept]

    def __getitem__(self, name: str) -> Source:
        """A file.

        Raises:
            KeyError: its text is not there.
            StoreError: it is damaged.
        """
        if name not in self._names:
            raise KeyError(name)
        digest = self.digests[name]
        data = self._run.source(digest)
        if data is None:
            raise KeyError(name)
        return Source(name, digest, data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _stays_inside(name: str) -> bool:
    """Whether `name`, as a path below a directory, stays in it: relative, without `..` and NUL."""
    return bool(name) and not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


LIMIT_FILE: Final = 1 << 20
"""Bytes of a source file that is kept."""
LIMIT_RUN: Final = 20 << 20
"""Bytes of all source files that a run keeps, before they are compressed."""

SOURCE_NAME = re.compile(r"([0-9a-f]{16})\.gz")
_GZIP = 16 + zlib.MAX_WBITS
_ROOM = 1 << 16
"""Bytes by which a text may have grown where secrets were taken out, and may be longer once it is compressed."""


def encode(data: bytes) -> bytes:
    """`data` compressed as gzip without time or name, so that equal files give equal bytes."""
    packing = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    return packing.compress(data) + packing.flush()


def decode(folder: Directory, name: str) -> bytes:
    """Decompress a stored source file.

    Args:
        folder: the directory of a run's sources.
        name: the file in it.

    Raises:
        FileNotFoundError: there is none.
        StoreError: it is damaged.
    """
    packed = folder.read_file(name, LIMIT_FILE + _ROOM)
    path = f"{folder.path}/{name}"
    unpacking = zlib.decompressobj(_GZIP)
    try:
        data = unpacking.decompress(packed, LIMIT_FILE + _ROOM)
    except zlib.error:
        raise DamageError(path, "it cannot be unpacked") from None
    if not unpacking.eof or unpacking.unused_data:
        longer = "it is longer than a source file that is kept"
        raise DamageError(path, longer if unpacking.unconsumed_tail else "it is not one compressed file")
    return data


def kept_in(place: Directory) -> frozenset[str]:
    """Digests of the source files in `place`'s directory of sources; empty where there is none.

    Raises:
        StoreError: the directory is damaged.
    """
    try:
        with place.folder(SOURCES) as folder:
            return frozenset(match[1] for match in map(SOURCE_NAME.fullmatch, folder.names()) if match)
    except FileNotFoundError:
        return frozenset()


def read_from(place: Directory, digest: str) -> bytes | None:
    """The source file with `digest` in `place`'s directory of sources; None where it is not kept.

    Raises:
        StoreError: it is damaged.
    """
    try:
        with place.folder(SOURCES) as folder:
            return decode(folder, f"{digest}.gz")
    except FileNotFoundError:
        return None

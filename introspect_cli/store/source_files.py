"""Files under `sources/` of a run: a source file each, compressed, named by the digest of what it held.

A store may be a stranger's: no file is unpacked beyond the limit.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Final

from introspect_cli.store.files import SOURCES, DamageError

if TYPE_CHECKING:
    from introspect_cli.store.files import Folder

LIMIT_FILE: Final = 1 << 20
"""Bytes of a source file that is kept."""
LIMIT_RUN: Final = 20 << 20
"""Bytes of all source files that a run keeps, before they are compressed."""

SOURCE_NAME = re.compile(r"([0-9a-f]{16})\.gz")
_GZIP = 16 + zlib.MAX_WBITS
_ROOM = 1 << 16
"""Bytes by which a text may have grown where secrets were taken out, and may be longer once it is compressed."""


def encode(data: bytes) -> bytes:
    """A source file as it is kept: the same bytes for the same file."""
    packing = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    return packing.compress(data) + packing.flush()


def decode(folder: Folder, name: str) -> bytes:
    """What a file holds.

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


def kept_in(place: Folder) -> frozenset[str]:
    """Digests of the source files that are kept below a directory.

    Raises:
        StoreError: their directory is damaged.
    """
    try:
        folder = place.folder(SOURCES)
    except FileNotFoundError:
        return frozenset()
    try:
        return frozenset(match[1] for match in map(SOURCE_NAME.fullmatch, folder.names()) if match)
    finally:
        folder.close()


def read_from(place: Folder, digest: str) -> bytes | None:
    """A source file that is kept below a directory; None where it is not.

    Raises:
        StoreError: it is damaged.
    """
    try:
        folder = place.folder(SOURCES)
    except FileNotFoundError:
        return None
    try:
        return decode(folder, f"{digest}.gz")
    except FileNotFoundError:
        return None
    finally:
        folder.close()

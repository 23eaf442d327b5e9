"""The text of the source files that a run was made of: files in `sources/` of a rank, compressed, named by content.

That a file changed is told by its digest; what changed in it only by its text, and by the time somebody asks, the file
may be another one or gone. So a run keeps the text, each file once, compressed, under the digest by which
the settings `sources` name it. Secrets were taken out before: a text whose own digest is not that of its name is
not all that the file held. A store may be a stranger's: names that lead out of a directory are left out, and no file is
unpacked beyond the limit.
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Final

from introspect_cli.store.files import DamageError

if TYPE_CHECKING:
    from introspect_cli.store.files import Directory


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
        StoreError: it is damaged, or more than LIMIT_FILE and `_ROOM` long.
    """
    packed = folder.read_file(name, LIMIT_FILE + _ROOM)
    path = f"{folder.path}/{name}"
    unpacking = zlib.decompressobj(_GZIP)
    try:
        data = unpacking.decompress(packed, LIMIT_FILE + _ROOM)
    except zlib.error:
        raise DamageError(path, "it cannot be unpacked") from None
    if not unpacking.eof or unpacking.unused_data:
        raise DamageError(path, "it is not one compressed file, or too long")
    return data

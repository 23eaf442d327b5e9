"""A run in object storage: pieces, and a catalogue that says which bytes of which file are where.

Objects cannot be appended to. So what a rank's files have grown by is put in one object, a *piece*, which never changes
again; and one small object, the *catalogue*, is put after it and names the pieces of every file. Whatever a catalogue
names is there; what came later does not exist. It also holds what every reader needs first: the step index, the
manifest, the head of the records. So opening a rank is one request, and a step is a range of one piece.

A process that is killed sends no more, and says nothing of it. So a catalogue says whether it is the last one, when it
was put, and within how many seconds another was to follow.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from introspect_cli.store.files import FORMAT, DamageError

CATALOGUE: Final = "catalogue"
PIECE: Final = re.compile(r"\d{6}-[0-9a-f]{8}\.piece")
INLINE: Final = -1
"""The number of the piece of bytes that are in the catalogue itself."""

LIMIT: Final = 320 << 20
"""Bytes of a catalogue: the largest index, and room beside it."""

_HEADER = struct.Struct("<8sIII")
"""Magic, format, CRC-32 of what follows, bytes of the JSON; then both parts, compressed as one."""

_MAGIC = b"INTROSPC"
_ID = re.compile(r"[0-9a-f]{0,32}")
_MOST = 1 << 62
_LATEST = 1e11


def digest_of(data: bytes) -> str:
    """What an extent says of its bytes, hexadecimal."""
    return blake2b(data, digest_size=16).hexdigest()


class Extent(NamedTuple):
    """Bytes of a file that follow those of the extent before it.

    Attributes:
        piece: the number of the piece, or `INLINE`.
        offset: where in it.
        length: how many.
        digest: what they digest to, hexadecimal; "" of records, whose steps the index vouches for one by one.
    """

    piece: int
    offset: int
    length: int
    digest: str = ""


@dataclass
class Catalogue:
    """What was sent of a directory.

    Attributes:
        run_id: of the run; hexadecimal.
        over: whether nothing will follow.
        sent: when it was put, in seconds since 1970.
        every: within how many seconds the next one was to follow.
        pieces: name and size of each.
        files: extents by the name of a file.
        inline: bytes that are in the catalogue.
    """

    run_id: str = ""
    over: bool = False
    sent: float = 0.0
    every: float = 0.0
    pieces: list[tuple[str, int]] = field(default_factory=list)
    files: dict[str, list[Extent]] = field(default_factory=dict)
    inline: bytes = b""

    def encoded(self) -> bytes:
        """The object."""
        text = json.dumps(vars(self) | {"inline": len(self.inline)}, separators=(",", ":")).encode()
        body = zlib.compress(text + self.inline, 1)
        return _HEADER.pack(_MAGIC, FORMAT, zlib.crc32(body), len(text)) + body

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return sum(extent.length for extent in self.files[name])


def decode(data: bytes, path: str, allowed: re.Pattern[str]) -> Catalogue:
    """What a catalogue says.

    Args:
        data: the object.
        path: its URL.
        allowed: names that a file may have.

    Raises:
        DamageError: it was altered, or no version writes such a thing.
    """
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        raise DamageError(path, "it is no catalogue of a run")
    _, number, crc, length = _HEADER.unpack_from(data)
    if zlib.crc32(data[_HEADER.size :]) != crc:
        raise DamageError(path, "its bytes are not those that were sent")
    if number > FORMAT:
        raise DamageError(path, f"it has format {number}, which a newer introspect-cli reads")
    try:
        unpacking = zlib.decompressobj()
        body = unpacking.decompress(data[_HEADER.size :], LIMIT)
        said = json.loads(body[:length])
        catalogue = _checked(said, body[length:])
        strange = next((name for name in catalogue.files if not allowed.fullmatch(name)), None)
    except (ValueError, LookupError, TypeError, RecursionError, zlib.error):
        raise DamageError(path, "what it says cannot be read") from None
    if strange is not None:
        raise DamageError(path, "it names a file that no run has")
    return catalogue


def _checked(said: Any, inline: bytes) -> Catalogue:
    pieces = [(str(name), _number(size)) for name, size in said["pieces"]]
    if not all(PIECE.fullmatch(name) for name, _ in pieces) or said["inline"] != len(inline):
        raise ValueError
    files = {}
    for name, extents in said["files"].items():
        files[name] = [Extent(piece, _number(at), _number(length), str(mark)) for piece, at, length, mark in extents]
        for extent in files[name]:
            room = len(inline) if extent.piece == INLINE else pieces[_number(extent.piece)][1]
            if extent.offset + extent.length > room:
                raise ValueError
    sent, every = float(said["sent"]), float(said["every"])
    if not _ID.fullmatch(said["run_id"]) or not 0 <= sent < _LATEST or not 0 <= every < _LATEST:
        raise ValueError
    return Catalogue(said["run_id"], said["over"] is True, sent, every, pieces, files, inline)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(value)
    return value

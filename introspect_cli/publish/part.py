"""What one process sends of a run to object storage: what has grown, in a piece, then the catalogue that names it.

Nothing is queued: what waits to be sent is the run's directory itself. What failed is sent in the next round, and
whoever sends a run again, later, finds the catalogue and goes on from there.
"""

from __future__ import annotations

import secrets
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import (
    HEADS,
    LOG,
    RANK_NAME,
    SOURCES,
    TENSORS,
    DamageError,
    Directory,
    Folder,
    is_locked,
)
from introspect_cli.store.format.log import CACHE, HEAD, START, Frames
from introspect_cli.store.remote.objects import CATALOGUE, INLINE, Catalogue, Extent, NothingThereError
from introspect_cli.store.remote.pack import files_of
from introspect_cli.store.remote.remote_folder import catalogues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from introspect_cli.store.remote.objects import Storage

MAX_PIECE = 16 << 20

OTHER_RUN = "{} holds another run: choose another URL, or remove what is there"

_TENSOR = ".safetensors"
_NEVER_REPLACED = (f"{TENSORS}/", f"{SOURCES}/")
"""Directories of files that are named by their content."""


class ByteRange(NamedTuple):
    """Bytes of a file to upload."""

    name: str
    begin: int
    end: int


class _State(NamedTuple):
    """State of a directory at one moment.

    Attributes:
        over: whether nobody writes it any more.
        inline: content that goes into the catalogue itself, by the name of its file: what may be replaced by another.
        lengths: bytes of each other file, by its name; of a log those that hold whole frames.
    """

    over: bool
    inline: dict[str, bytes]
    lengths: dict[str, int]


class PartSender:
    """Uploads one directory with one catalogue: a run of one process, or a rank of a launch.

    Attributes:
        over: whether all is sent of a run that nobody writes any more.
        waiting: bytes that were there to send, and were not sent yet.
    """

    def __init__(
        self, run: Path, place: str, storage: Storage, run_id: str, *, sources: bool, before: Callable[[], None]
    ) -> None:
        """Read the catalogue of this directory that is in the storage, if any, to go on from it; nothing is sent yet.

        Args:
            run: the run's directory.
            place: the directory in it; "" for all of it.
            storage: where to.
            run_id: the run's.
            sources: whether the text of source files goes with it.
            before: is called before a catalogue is put, to send what its logs name.

        Raises:
            StoreError: it cannot be found out, or another run is there.
        """
        self.waiting = 0
        self.over = False
        self._path = run / place
        self._storage, self._place = storage, f"{place}/" if place else ""
        self._run_id = run_id
        self._sources = sources
        self._extents: dict[str, list[tuple[str, Extent]]] = {}
        self._sizes: dict[str, int] = {}
        self._heads: dict[str, bytes] = {}
        self._before_catalogue = before
        self._number = 0
        self._resume(place)

    def _resume(self, place: str) -> None:
        """Take over the pieces of an earlier catalogue that exist, as far as each file has them without a gap.

        Nothing where there is no catalogue or it is damaged. New pieces are numbered after all that exist.

        Raises:
            StoreError: the catalogue is another run's.
        """
        try:
            [before] = catalogues(self._storage, [place])
            entries = self._storage.entries(place) or {}
        except (NothingThereError, DamageError):
            return
        if before is None:
            return
        if before.run_id != self._run_id:
            raise StoreError(OTHER_RUN.format(self._storage.url))
        for name, extents in before.files.items():
            for extent in extents:
                if extent.piece == INLINE:
                    if name.endswith(HEADS):
                        data = before.inline[extent.offset : extent.offset + extent.length]
                        self._heads[name] = data[CACHE.size : CACHE.size + CACHE.unpack_from(data)[2] * HEAD.size]
                    continue
                piece, size = before.pieces[extent.piece]
                if entries.get(piece) != size:
                    break  # what follows it in the file is sent again
                self._sizes[piece] = size
                self._extents.setdefault(name, []).append((piece, extent))
        self._number = max((int(piece[:6]) + 1 for piece in entries if piece[:6].isdecimal()), default=0)

    def send(self, every: float) -> None:
        """Upload what is new as pieces, call `before`, then upload the catalogue; sets `waiting` and `over`.

        The catalogue is uploaded even if nothing is new, except where `over` was set before. Pieces that it no longer
        names are removed.

        Args:
            every: within how many seconds this will be called again; said in the catalogue.

        Raises:
            StoreError: some of it was not sent.
            OSError: a file could not be read, as where steps are being dropped.
        """
        state = self._state()
        unsent = list(self._unsent(state))
        self.waiting = sum(part.end - part.begin for part in unsent)
        if self.over and not unsent:
            return
        for group in _grouped(unsent):
            self._put(group)
        self._before_catalogue()
        self._put_catalogue(state, every)
        self.over = state.over

    # --- what there is

    def _state(self) -> _State:
        """The directory's present state: whether nobody holds its lock, small files, lengths of logs and tensors.

        Without `sources`, the text of source files is left out.
        """
        with Folder.at(str(self._path)) as folder:
            over = not is_locked(folder)  # asked first: what is then read is all there will be
            inline, lengths = dict[str, bytes](), dict[str, int]()
            for name, path in files_of(self._path, sources=self._sources):
                if name.startswith(_NEVER_REPLACED):
                    lengths[name] = path.stat().st_size
                elif not name.endswith((LOG, HEADS)):
                    inline[name] = path.read_bytes()
            below = [""] if self._place else [name for name in folder.names() if RANK_NAME.fullmatch(name)]
            for name in below:
                number = int((name or self._path.name).removeprefix("rank"))
                with folder.folder(name) if name else nullcontext(folder) as rank:
                    if LOG in rank:
                        self._add_rank(rank, f"{name}/" if name else "", number, inline, lengths)
        return _State(over, inline, lengths)

    def _add_rank(
        self, rank: Directory, prefix: str, number: int, inline: dict[str, bytes], lengths: dict[str, int]
    ) -> None:
        """Add a rank's heads and the beginning of its log to `inline`, and the log's length to `lengths`.

        Nothing of a log that has no run id yet. Forgets what was sent of a log that was written anew.

        Args:
            rank: the rank's directory.
            prefix: path of that in the directory that is sent, with a slash at its end; "" where it is the same.
            number: the rank.
            inline: filled, as in `_State`.
            lengths: filled, as in `_State`.
        """
        log, name = f"{prefix}{LOG}", f"{prefix}{HEADS}"
        with rank.file(LOG) as file:
            frames = Frames(file, number, file.path)
            if not frames.run_id:
                return
            inline[name], lengths[log] = frames.encoded(), int(frames.begins[-1])
            inline[log] = file.read(0, START.size)
        heads = frames.heads.tobytes()
        if not heads.startswith(self._heads.get(name, b"")):  # it was written anew, without some steps
            self._extents.pop(log, None)
        self._heads[name] = heads

    # --- what is to be sent

    def _unsent(self, state: _State) -> Iterator[ByteRange]:
        """Byte ranges that are in no piece yet, of at most `MAX_PIECE` bytes: sources, then logs, then tensors.

        Files of one sort by the order of `state.lengths`; the head of a log, which is inline, is not among them.
        """
        for name in sorted(state.lengths, key=lambda name: name.endswith(LOG) + 2 * name.endswith(_TENSOR)):
            sent = sum(extent.length for _, extent in self._extents.get(name, ()))
            for at in range(len(state.inline.get(name, b"")) + sent, state.lengths[name], MAX_PIECE):
                yield ByteRange(name, at, min(at + MAX_PIECE, state.lengths[name]))

    def _read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes `begin` to before `end` of a file of the directory; fewer where the file is shorter."""
        folders, _, last = name.rpartition("/")
        with Folder.at(str(self._path / folders)) as place, place.file(last) as file:
            return file.read(begin, end)

    # --- sending

    def _put(self, group: list[ByteRange]) -> None:
        """Upload some byte ranges as one piece, note where in it each lies, and take them off `waiting`.

        Raises:
            OSError: a file became shorter.
        """
        parts, extents, at = [], [], 0
        for name, begin, end in group:
            data = self._read(name, begin, end)
            if len(data) != end - begin:
                raise OSError(f"{self._path / name} became shorter")
            parts.append(data)
            extents.append((name, Extent(0, at, len(data))))
            at += len(data)
        piece = f"{self._number:06d}-{secrets.token_hex(4)}.piece"
        self._storage.put(f"{self._place}{piece}", b"".join(parts))
        self._number += 1
        self._sizes[piece] = at
        for name, extent in extents:
            self._extents.setdefault(name, []).append((piece, extent))
        self.waiting -= at

    def _put_catalogue(self, state: _State, every: float) -> None:
        """Upload the catalogue of all pieces in use, then remove the pieces that are not."""
        used = {piece for extents in self._extents.values() for piece, _ in extents}
        pieces = sorted(used)
        number = {piece: place for place, piece in enumerate(pieces)}
        files: dict[str, list[Extent]] = {}
        at = 0
        for name, data in state.inline.items():
            files[name] = [Extent(INLINE, at, len(data))]
            at += len(data)
        for name, extents in self._extents.items():
            files.setdefault(name, []).extend(extent._replace(piece=number[piece]) for piece, extent in extents)
        catalogue = Catalogue(
            self._run_id,
            state.over,
            time.time(),
            every,
            [(piece, self._sizes[piece]) for piece in pieces],
            files,
            b"".join(state.inline.values()),
        )
        self._storage.put(f"{self._place}{CATALOGUE}", catalogue.encoded())
        left = [f"{self._place}{piece}" for piece in self._sizes if piece not in used]
        if left:
            self._storage.remove(left)
            self._sizes = {piece: size for piece, size in self._sizes.items() if piece in used}


def _grouped(unsent: list[ByteRange]) -> Iterator[list[ByteRange]]:
    """Group byte ranges, in order, into lists of at most `MAX_PIECE` bytes together."""
    group: list[ByteRange] = []
    for part in unsent:
        if group and sum(each.end - each.begin for each in group) + part.end - part.begin > MAX_PIECE:
            yield group
            group = []
        group.append(part)
    if group:
        yield group

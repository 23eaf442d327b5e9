"""A run opened for reading, while it is written or after, from oneself or from a stranger.

The answer must be right or an error that says what is wrong, whatever the bytes. Nothing is followed out of the
directory, nothing is read without a limit, nothing is believed before it is checked, and what is not whole does not
exist.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError, scarcity
from introspect_cli.store import documents, tensorfile
from introspect_cli.store.closed import rank_folder
from introspect_cli.store.files import (
    CHILDREN,
    FORMAT,
    LABEL,
    LIMIT_DOCUMENT,
    LONGEST_LABEL,
    MANIFEST,
    SETTINGS,
    TENSORS,
    DamageError,
    Folder,
    is_locked,
    reason,
    unreadable,
)
from introspect_cli.store.index import newer_format
from introspect_cli.store.launch import ATTEMPT_NAME, endings, launch_of, merged, world_size
from introspect_cli.store.objects import is_remote
from introspect_cli.store.pack import open_store
from introspect_cli.store.rank_reader import RankReader, Shared
from introspect_cli.store.source_files import kept_in, read_from
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

RANK_NAME = re.compile(r"rank(0|[1-9]\d{0,5})")
SETTINGS_NAME = re.compile(r"([a-z0-9_]{1,64})\.yaml")
_VERSION = re.compile(r"[0-9A-Za-z.+!-]{1,32}")
_MAX_RANKS = 65536
_TYPES = {
    **dict.fromkeys(("argv", "children", "failures", "not_observed", "notes", "observed"), list),
    **dict.fromkeys(("alone", "narrowing", "options", "tool"), dict),
}
"""What readers of a manifest take for granted; what is of another type was written by no capture, and is left out."""


class RunState(str, Enum):
    """How a run ended, if it did."""

    RUNNING = "running"
    COMPLETE = "complete"
    INTERRUPTED = "interrupted"


class Settings(Mapping[str, Any]):
    """The settings documents of a run by name, each read when first asked for."""

    def __init__(self, folder: Folder | None, run_id: object) -> None:
        self._folder = folder
        self._run_id = run_id
        matches = (SETTINGS_NAME.fullmatch(name) for name in folder.names()) if folder is not None else ()
        self._names = [match[1] for match in matches if match]
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """A document's plain data.

        Raises:
            KeyError: there is no such document.
            StoreError: it is damaged.
        """
        if name not in self._read:
            if self._folder is None or name not in self._names:
                raise KeyError(name)
            path = f"{self._folder.path}/{name}.yaml"
            try:
                data = self._folder.read_file(f"{name}.yaml", LIMIT_DOCUMENT)
            except FileNotFoundError:
                raise KeyError(name) from None
            documents.check(data, f"{SETTINGS}/{name}.yaml", self._run_id, path)
            self._read[name] = documents.harmless(documents.load(data, path))
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Run:
    """A run opened for reading; a context manager that closes its files.

    Attributes:
        path: its directory, or the file or URL it was packed into, as it was named.
        manifest: the manifest, with at least `format`; of a run that several processes wrote, what they say together.
        manifests: what each rank says for itself, by number; empty where one process wrote the run.
        ranks: numbers of its ranks, rising.
        world_size: how many ranks were started, those included that left nothing.
        state: whether it is still being written, was closed properly, or ends where something stopped it.
    """

    def __init__(self, path: str | Path, folder: Folder, only: Collection[int] | None = None) -> None:
        self.path = path
        self._folder = folder
        self._when_closed: list[Callable[[], None]] = []
        self._holding: list[int] | None = None
        self.elsewhere: Callable[[int], NDArray[Any] | None] | None = None
        """Gives whole tensors by their checksums that lie in no store."""
        # Asked first: a run that ends while it is opened is called running, never interrupted.
        locked = is_locked(folder)
        self.manifest = read_manifest(folder)
        self._ranks = self._open_ranks(only)
        self.ranks = tuple(sorted(self._ranks))
        self.manifests: dict[int, dict[str, Any]] = {}
        self.world_size = world_size(self.manifest) or self.whole_of or len(self.ranks)
        if launch_of(self.manifest) is not None:
            self.manifests, some_locked = read_rank_manifests(folder, self.ranks, self.manifest.get("id"))
            locked |= some_locked
            self.manifest = merged(self.manifest, self.manifests)
        self.state = run_state(self.manifest, self.manifests, self._ranks.values(), locked=locked)

    def spawned(self) -> Folder | None:
        """The launch below a run that recorded no step itself, where there is one: what `mp.spawn` started."""
        return None if any(map(len, self._ranks.values())) else _only_launch(self._folder)

    def _open_ranks(self, only: Collection[int] | None) -> dict[int, RankReader]:
        matches = [match for match in map(RANK_NAME.fullmatch, self._folder.names()) if match]
        self._every = sorted(int(match[1]) for match in matches)  # whoever of them is opened
        matches = [match for match in matches if only is None or int(match[1]) in only]
        if len(matches) > _MAX_RANKS:
            raise DamageError(self._folder.path, "it has more ranks than a run can have")
        readers = {}
        shared = Shared()
        self._folder.expect([match[0] for match in matches])
        for match in matches:
            rank = int(match[1])
            reader = readers[rank] = RankReader(self._folder, rank, shared=shared)
            if reader.run_id and reader.run_id.hex() != self.manifest.get("id"):
                raise DamageError(reader.path, "it belongs to another run than the manifest")
        return readers

    def rank(self, rank: int) -> RankReader:
        """The reader of one rank.

        Raises:
            KeyError: there is no such rank.
        """
        return self._ranks[rank]

    @cached_property
    def last_step(self) -> int | None:
        """Number of the last step that every rank has whole; None where there is none."""
        return last_common_step(reader for rank, reader in self._ranks.items() if rank not in self.left_out)

    @cached_property
    def left_out(self) -> frozenset[int]:
        """Ranks that were to record no step (`capture --ranks`)."""
        return frozenset(rank for rank, manifest in self.manifests.items() if manifest.get("left_out") is True)

    @cached_property
    def recorded(self) -> tuple[int, ...]:
        """The ranks that were to record steps; all, where none was."""
        return tuple(rank for rank in self.ranks if rank not in self.left_out) or self.ranks

    @property
    def whole_of(self) -> int:
        """How many ranks were put together in this run's one; 0 where it is no such run."""
        whole = self.manifest.get("whole")
        size = whole.get("world_size") if isinstance(whole, dict) else None
        return size if isinstance(size, int) and size > 0 else 0

    @property
    def alone(self) -> str:
        """Which rank of how many the one process of the run was, where the others are not in it; "" else."""
        alone = self.manifest.get("alone", {})
        rank, world = alone.get("rank"), alone.get("world_size")
        return f"rank {rank} of {world} alone" if isinstance(rank, int) and isinstance(world, int) else ""

    @property
    def label(self) -> str:
        """What somebody wrote of the run; "" where nobody did."""
        try:
            data = self._folder.read_file(LABEL, 4 * LONGEST_LABEL)
        except FileNotFoundError:
            return ""
        return clean(data.decode("utf-8", "replace").strip(), LONGEST_LABEL)

    @cached_property
    def endings(self) -> list[str]:
        """Sentences on an attempt before this one, on what was not sent, and on `lost_ranks`."""
        unfinished = [reader.unfinished for reader in self._ranks.values() if reader.unfinished]
        if self.state is RunState.RUNNING:
            then = dt.datetime.fromtimestamp(min(unfinished), dt.timezone.utc) if unfinished else None
            return [f"What is there was sent by {then:%Y-%m-%d %H:%M:%S} UTC, and more was to follow"] if then else []
        if unfinished and self.world_size < 2:
            ends = "has no step" if self.last_step is None else f"ends with step {self.last_step}"
            where = "its last pieces may be missing, and more may lie where it was recorded"
            return [f"What was sent of the run {ends}: {where}"]
        launch = launch_of(self.manifest)
        attempt = launch.get("attempt") if launch is not None else None
        if not attempt or self.world_size < 2:
            return self.lost_ranks
        again = f"This is attempt {attempt} of the launch: what the one before recorded is beside it"
        return [again, *self.lost_ranks]

    @cached_property
    def lost_ranks(self) -> list[str]:
        """Sentences on ranks that left nothing or ended before the others; none while the run is being written."""
        if self.world_size < 2 or self.whole_of or self.state is RunState.RUNNING:
            return []
        last = {rank: reader.last_step for rank, reader in sorted(self._ranks.items()) if rank not in self.left_out}
        ended = {rank: reader.ended for rank, reader in self._ranks.items()}
        unfinished = {rank for rank, reader in self._ranks.items() if reader.unfinished}
        return endings(self.world_size, last, ended, self.left_out, unfinished if self.size_elsewhere else None)

    @cached_property
    def settings(self) -> Settings:
        """The settings documents by name, read when asked for; the lowest rank's, where each has its own."""
        return self.settings_of(min(self.manifests)) if self.manifests else self._settings(self._folder)

    def settings_of(self, rank: int) -> Settings:
        """The settings documents of one rank; the run's, where one process wrote it."""
        if rank not in self.manifests:
            return self.settings
        with rank_folder(self._folder, rank) as folder:
            return self._settings(folder)

    def _settings(self, folder: Folder) -> Settings:
        try:
            return Settings(folder.folder(SETTINGS), self.manifest.get("id"))
        except FileNotFoundError:
            return Settings(None, None)

    def tensor(self, checksum: int) -> NDArray[Any] | None:
        """A tensor that was stored in full, by its checksum; None where it was not.

        bfloat16, fp8 and complex32 come as the float32 or complex64 of the same value; element types numpy does
        not know as a flat uint8 array of their bytes.
        """
        if self.elsewhere is not None:
            return self.elsewhere(checksum)
        places = self._places(self._with_tensors)
        return next((tensor for place in places if (tensor := _tensor(place, checksum)) is not None), None)

    def source(self, digest: str) -> bytes | None:
        """A source file whose text is kept, by its digest; None where it is not.

        Raises:
            StoreError: its file is damaged.
        """
        return next((data for place in self._places() if (data := read_from(place, digest)) is not None), None)

    @cached_property
    def kept_sources(self) -> frozenset[str]:
        """Digests of the source files whose text is kept.

        Raises:
            StoreError: their directory is damaged.
        """
        return frozenset(digest for place in self._places() for digest in kept_in(place))

    @property
    def _with_tensors(self) -> list[int]:
        """The ranks that hold whole tensors: of thousands, none as a rule."""
        if self._holding is None or self.state is RunState.RUNNING:
            self._holding = [rank for rank, place in zip(self._every, self._places(), strict=False) if TENSORS in place]
        return self._holding

    def _places(self, ranks: Iterable[int] | None = None) -> Iterator[Folder]:
        """The directories that hold whole tensors and source files: each rank's, where each has its own."""
        if not self.manifests:
            yield self._folder
            return
        for rank in self._every if ranks is None else ranks:
            place = rank_folder(self._folder, rank)
            try:
                yield place
            finally:
                place.close()

    @property
    def size_elsewhere(self) -> int:
        """Bytes of its files in object storage; 0 where it is on disk."""
        return self._folder.size_elsewhere

    def when_closed(self, then: Callable[[], None]) -> None:
        """Call a function when the run is closed."""
        self._when_closed.append(then)

    def close(self) -> None:
        """Close all files; what was read stays valid."""
        for reader in self._ranks.values():
            reader.close()
        self._folder.close()
        while self._when_closed:
            self._when_closed.pop()()

    def __enter__(self) -> Run:  # noqa: PYI034 -- typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tensor(place: Folder, checksum: int) -> NDArray[Any] | None:
    """A tensor that is kept below a directory, if it is."""
    try:
        with place.folder(TENSORS) as folder, folder.file(f"{checksum:016x}.safetensors") as handle:
            tensor: NDArray[Any] = tensorfile.decode(handle, checksum)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(f"{place.path}/{TENSORS}", error) from None
    return tensor


def read_rank_manifests(run: Folder, ranks: Iterable[int], run_id: object) -> tuple[dict[int, dict[str, Any]], bool]:
    """The manifests that ranks of a launch wrote, by number, and whether any of them is being written."""
    manifests, locked = {}, False
    for rank in ranks:
        with rank_folder(run, rank) as folder:
            locked |= is_locked(folder)
            if MANIFEST in folder:  # a rank that was killed at its very start has none
                manifests[rank] = read_manifest(folder)
                if manifests[rank].get("id") != run_id:
                    raise DamageError(folder.path, "it belongs to another run than the manifest")
    return manifests, locked


def run_state(
    manifest: Mapping[str, Any],
    manifests: Mapping[int, Mapping[str, Any]],
    ranks: Iterable[RankReader],
    *,
    locked: bool,
) -> RunState:
    """How a run with these ranks ended, if it did.

    Args:
        manifest: the run's.
        manifests: what each rank says for itself, by number; empty where one process wrote the run.
        ranks: the readers.
        locked: whether a process holds the run.
    """
    ranks = list(ranks)
    if locked or any(rank.running for rank in ranks):
        return RunState.RUNNING
    # A rank that says that it recorded no step has no index that could tell how it ended.
    recorded = [rank for rank in ranks if rank.run_id or manifests.get(rank.rank, manifest).get("steps") != 0]
    if manifest.get("status") == "complete" and all(rank.ended for rank in recorded):
        return RunState.COMPLETE
    return RunState.INTERRUPTED


def last_common_step(ranks: Iterable[RankReader]) -> int | None:
    """Number of the last step that every rank has whole; None where there is none."""
    last = [rank.last_step for rank in ranks]
    recorded = [step for step in last if step is not None]
    return min(recorded) if recorded and len(recorded) == len(last) else None


def open_run(path: str | Path, *, only: Collection[int] | None = None) -> Run:
    """Open the run in the directory `path`.

    Args:
        path: where it is.
        only: the ranks to open, of a run of so many that a task looks at some; all where it is None.

    Raises:
        StoreError: there is none, it is not a run, it is damaged, or it is newer than this reader.
    """
    folder = open_store(path)
    try:
        shown = path if is_remote(path) else Path(path)
        run = Run(shown, _last_attempt(folder), only)
        spawned = run.spawned()
        if spawned is None:
            return run
        run.close()
        return Run(shown, spawned, only)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {scarcity(error) or reason(error)}") from None


def _last_attempt(folder: Folder) -> Folder:
    """The directory of the last attempt of a launch that was restarted; the run's own where it was not."""
    attempts = [int(match[1]) for match in map(ATTEMPT_NAME.fullmatch, folder.names()) if match]
    for number in sorted(attempts, reverse=True):
        attempt = folder.folder(f"attempt{number}")
        if MANIFEST in attempt:
            folder.close()
            return attempt
        attempt.close()
    return folder


def _only_launch(folder: Folder) -> Folder | None:
    """The one child of a run that is a launch; None where there is none, or more than one."""
    if CHILDREN not in folder:
        return None
    children = folder.folder(CHILDREN)
    launches = []
    try:
        for name in children.names():
            child = children.folder(name)
            if MANIFEST in child and launch_of(read_manifest(child)) is not None:
                launches.append(child)
            else:
                child.close()
    finally:
        children.close()
    if len(launches) == 1:
        return launches[0]
    for child in launches:
        child.close()
    return None


def read_manifest(folder: Folder) -> dict[str, Any]:
    """The manifest of the run in `folder`."""
    path = f"{folder.path}/{MANIFEST}"
    try:
        data = folder.read_file(MANIFEST, LIMIT_DOCUMENT)
    except FileNotFoundError:
        raise DamageError(path, "it is missing") from None
    manifest = documents.load(data, path)
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if type(number) is not int or number < FORMAT:
        raise DamageError(path, "it does not say which format the run has")
    if number > FORMAT:
        tool = manifest.get("tool")
        version = tool.get("version") if isinstance(tool, dict) else None
        is_version = isinstance(version, str) and _VERSION.fullmatch(version)
        raise newer_format(number, version if is_version else None, folder.path)
    documents.check(data, MANIFEST, manifest.get("id"), path)
    plain = documents.harmless(manifest)
    return {key: value for key, value in plain.items() if isinstance(value, _TYPES.get(key, object))}

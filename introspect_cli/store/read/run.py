"""A run opened for reading, while it is written or after, from oneself or from a stranger.

The answer must be right or an error that says what is wrong, whatever the bytes. Nothing is followed out of the
directory, nothing is read without a limit, nothing is believed before it is checked, and what is not whole does not
exist.
"""

from __future__ import annotations

import datetime as dt
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError, scarcity
from introspect_cli.store.files.folders import (
    LABEL,
    LONGEST_LABEL,
    RANK_NAME,
    SETTINGS,
    TENSORS,
    DamageError,
    Directory,
    is_locked,
    reason,
)
from introspect_cli.store.files.handles import Closing
from introspect_cli.store.format import tensorfile
from introspect_cli.store.format.sources import kept_in, read_from
from introspect_cli.store.read.manifests import (
    Settings,
    endings,
    last_attempt,
    launch_of,
    merge_manifests,
    only_launch,
    rank_settings,
    read_manifest,
    read_rank_manifests,
    stages_in,
    world_size,
)
from introspect_cli.store.read.name_tables import Shared
from introspect_cli.store.read.rank_reader import RankReader, last_common_step
from introspect_cli.store.remote.objects import is_remote
from introspect_cli.store.remote.pack import from_anywhere, open_store
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

_MAX_RANKS = 65536


class RunState(str, Enum):
    """How a run ended, if it did."""

    RUNNING = "running"
    COMPLETE = "complete"
    INTERRUPTED = "interrupted"


class Run(Closing):
    """A run opened for reading; a context manager that closes its files.

    Attributes:
        path: its directory, or the file or URL it was packed into, as it was named.
        manifest: the manifest, with at least `format`; of a run that several processes wrote, what they say together.
        manifests: what each rank says for itself, by number; empty where one process wrote the run.
        ranks: numbers of its ranks, rising.
        world_size: how many ranks were started, those included that left nothing.
        left_out: ranks that were to record no step (`capture --ranks`).
        recorded: the ranks that were to record steps; all ranks where all were left out.
        last_step: the lowest last step of ranks not in `left_out` (a rank may lack it); None where one has no step.
        steps: how many steps the rank with most steps has.
        stages: pipeline stages by rank, of ranks whose manifests name some.
        state: whether it is still being written, was closed properly, or ends where something stopped it.
    """

    def __init__(self, path: str | Path, folder: Directory, only: Collection[int] | None = None) -> None:
        """Read the manifest and open the ranks' logs; names, records and settings are read when asked for.

        Args:
            path: the run as it was named.
            folder: its directory, closed with the run.
            only: the ranks to open; None for all.

        Raises:
            StoreError: it is damaged, or a newer version wrote it.
        """
        self.path = path
        self._folder = folder
        self._on_close: list[Callable[[], None]] = []
        self.load_tensor: Callable[[int], NDArray[Any] | None] | None = None
        """Gives whole tensors by their checksums that lie in no store."""
        # Asked first: a run that ends while it is opened is called running, never interrupted.
        locked = is_locked(folder)
        self.manifest = read_manifest(folder)
        self._ranks = self._open_ranks(only)
        self.ranks = tuple(sorted(self._ranks))
        self.manifests: dict[int, dict[str, Any]] = {}
        self.world_size = world_size(self.manifest) or self.combined_ranks or len(self.ranks)
        if launch_of(self.manifest) is not None:
            self.manifests = read_rank_manifests(self._ranks.values(), self.manifest.get("id"))
            self.manifest = merge_manifests(self.manifest, self.manifests)
        self.left_out = frozenset(rank for rank, one in self.manifests.items() if one.get("left_out") is True)
        self.recorded = tuple(rank for rank in self.ranks if rank not in self.left_out) or self.ranks
        self.last_step = last_common_step(self._ranks[rank] for rank in self.ranks if rank not in self.left_out)
        self.steps = max(map(len, self._ranks.values()), default=0)
        self.stages = stages_in(self.manifests)
        self.state = run_state(self.manifest, self.manifests, self._ranks.values(), locked=locked)

    def spawned(self) -> Directory | None:
        """The only launch among the children of a run without steps of its own (`mp.spawn`), opened; None otherwise."""
        return None if any(map(len, self._ranks.values())) else only_launch(self._folder)

    def _open_ranks(self, only: Collection[int] | None) -> dict[int, RankReader]:
        """Open the readers of all ranks, or of those in `only`, by rank; sets `_all_ranks`.

        Raises:
            DamageError: a log is damaged, or belongs to another run.
        """
        matches = [match for match in map(RANK_NAME.fullmatch, self._folder.names()) if match]
        self._all_ranks = sorted(int(match[1]) for match in matches)  # whoever of them is opened
        matches = [match for match in matches if only is None or int(match[1]) in only]
        if len(matches) > _MAX_RANKS:
            raise DamageError(self._folder.path, "it has more ranks than a run can have")
        readers = {}
        shared = Shared()
        self._folder.prefetch([match[0] for match in matches])
        for match in matches:
            rank = int(match[1])
            reader = readers[rank] = RankReader(self._folder, rank, shared=shared, rank_count=self.combined_ranks or 1)
            if reader.run_id and reader.run_id.hex() != self.manifest.get("id"):
                raise DamageError(reader.path, "it belongs to another run than the manifest")
        return readers

    def rank(self, rank: int) -> RankReader:
        """The reader of one rank.

        Raises:
            KeyError: there is no such rank.
        """
        return self._ranks[rank]

    def time(self, name: str) -> dt.datetime | None:
        """When the run `started` or `ended` (`name`) by its manifest, UTC where no zone is given; None if unknown."""
        try:
            time = dt.datetime.fromisoformat(str(self.manifest.get(name)))
        except ValueError:
            return None
        return time if time.tzinfo else time.replace(tzinfo=dt.timezone.utc)

    @property
    def combined_ranks(self) -> int:
        """How many ranks were combined into this run's one rank (`merge --whole`); 0 for any other run."""
        whole = self.manifest.get("whole")
        size = whole.get("world_size") if isinstance(whole, dict) else None
        return size if isinstance(size, int) and size > 0 else 0

    @property
    def address(self) -> str:
        """The run's URL, or its absolute path."""
        return from_anywhere(self.path)

    @property
    def lone_rank(self) -> str:
        """`rank 1 of 8 alone` where one process of a larger job was captured by itself; "" otherwise."""
        alone = self.manifest.get("alone", {})
        rank, world = alone.get("rank"), alone.get("world_size")
        return f"rank {rank} of {world} alone" if isinstance(rank, int) and isinstance(world, int) else ""

    @property
    def label(self) -> str:
        """The user's label of the run (`introspect runs label`), cleaned and cut to LONGEST_LABEL; "" without one.

        Read anew each time; StoreError for a file of over four bytes a character.
        """
        try:
            data = self._folder.read_file(LABEL, 4 * LONGEST_LABEL)
        except FileNotFoundError:
            return ""
        return clean(data.decode("utf-8", "replace").strip(), LONGEST_LABEL)

    @cached_property
    def endings(self) -> list[str]:
        """Sentences on how the run ended: an incomplete upload, an earlier attempt of the launch, `lost_ranks`."""
        said = []
        unfinished = [reader.unfinished for reader in self._ranks.values() if reader.unfinished]
        if unfinished:
            then = dt.datetime.fromtimestamp(min(unfinished), dt.timezone.utc)
            more = "more was to follow, and may lie where it was recorded"
            said.append(f"What is there was sent by {then:%Y-%m-%d %H:%M:%S} UTC: {more}")
        launch = launch_of(self.manifest) or {}
        if launch.get("attempt") and self.world_size > 1 and self.state is not RunState.RUNNING:
            said.append(f"This is attempt {launch['attempt']} of the launch: what the one before recorded is beside it")
        return [*said, *self.lost_ranks]

    @cached_property
    def lost_ranks(self) -> dict[str, int]:
        """Sentences on ranks without a log or a step, cut off, or closed before the others, each with its first rank.

        See `manifests.endings`.

        Empty while the run is being written, for a run of one rank, and for one put together from several.
        """
        if self.world_size < 2 or self.combined_ranks or self.state is RunState.RUNNING:
            return {}
        last = {rank: reader.last_step for rank, reader in sorted(self._ranks.items()) if rank not in self.left_out}
        ended = {rank: reader.ended for rank, reader in self._ranks.items()}
        return endings(self.world_size, last, ended, self.left_out)

    @cached_property
    def settings(self) -> Settings:
        """The settings documents by name, read when asked for; the lowest rank's, where each has its own.

        Empty where the run has none.
        """
        if self.manifests:
            return self.settings_of(min(self.manifests))
        try:
            return Settings.in_folder(self._folder.folder(SETTINGS), self.manifest.get("id"))
        except FileNotFoundError:
            return Settings("", (), str.encode, None)

    def settings_of(self, rank: int) -> Settings:
        """The settings documents of one rank; the run's, where one process wrote it."""
        return rank_settings(self._ranks[rank], self.manifest.get("id")) if rank in self.manifests else self.settings

    def tensor(self, checksum: int) -> NDArray[Any] | None:
        """A tensor that was stored in full, by its checksum; None where it was not.

        bfloat16, fp8 and complex32 come as the float32 or complex64 of the same value; element types numpy does
        not know as a flat uint8 array of their bytes. Where `load_tensor` is set, it alone is asked.
        """
        if self.load_tensor is not None:
            return self.load_tensor(checksum)
        places = self._places(self._with_tensors)
        return next((tensor for place in places if (tensor := tensorfile.read(place, checksum)) is not None), None)

    def source(self, digest: str) -> bytes | None:
        """The bytes of a source file whose text is kept, by its digest; None where it is not.

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

    @cached_property
    def _with_tensors(self) -> list[int]:
        """Ranks whose directories hold whole tensors."""
        return [rank for rank, place in zip(self._all_ranks, self._places(), strict=False) if TENSORS in place]

    def _places(self, ranks: Iterable[int] | None = None) -> Iterator[Directory]:
        """Directories that may hold whole tensors and sources: of a run of one process the run's own.

        Else those of `ranks` (None: all ranks), each closed when the next is asked for.
        """
        if not self.manifests:
            yield self._folder
            return
        for rank in self._all_ranks if ranks is None else ranks:
            place = self._folder.rank(rank)
            try:
                yield place
            finally:
                place.close()

    @property
    def remote_size(self) -> int:
        """Bytes of its files in object storage; 0 where it is on disk."""
        return self._folder.remote_size

    def on_close(self, then: Callable[[], None]) -> None:
        """Call `then` when the run is closed; the last added is called first."""
        self._on_close.append(then)

    def close(self) -> None:
        """Close all files; what was read stays valid."""
        for reader in self._ranks.values():
            reader.close()
        self._folder.close()
        while self._on_close:
            self._on_close.pop()()


def run_state(
    manifest: Mapping[str, Any],
    manifests: Mapping[int, Mapping[str, Any]],
    ranks: Iterable[RankReader],
    *,
    locked: bool,
) -> RunState:
    """RUNNING where a writer holds a lock; COMPLETE where the manifest says so and every rank ended; else INTERRUPTED.

    A rank whose log has not begun (`began`) and whose manifest says 0 steps (the run's, where it has none) need not
    have ended.

    Args:
        manifest: the run's.
        manifests: each rank's, by number; empty where one process wrote the run.
        ranks: the readers.
        locked: whether a process holds the run.
    """
    ranks = list(ranks)
    if locked or any(rank.running for rank in ranks):
        return RunState.RUNNING
    # A rank that says that it recorded no step has no records that could tell how it ended.
    recorded = [rank for rank in ranks if rank.began or manifests.get(rank.rank, manifest).get("steps") != 0]
    if manifest.get("status") == "complete" and all(rank.ended for rank in recorded):
        return RunState.COMPLETE
    return RunState.INTERRUPTED


def open_run(path: str | Path, *, only: Collection[int] | None = None) -> Run:
    """Open the run at `path`: of a launch its last attempt, of a run without steps the only launch among its children.

    Args:
        path: a directory, a pack or a URL, as `open_store` takes it.
        only: the ranks to open, of a run of so many that a task looks at some; all where it is None.

    Raises:
        StoreError: there is none, it is not a run, it is damaged, or it is newer than this reader.
    """
    folder = open_store(path)
    try:
        shown = path if is_remote(path) else Path(path)
        run = Run(shown, last_attempt(folder), only)
        spawned = run.spawned()
        if spawned is None:
            return run
        run.close()
        return Run(shown, spawned, only)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {scarcity(error) or reason(error)}") from None

"""What a run says of itself: its manifest, those of its ranks, its settings; and which of several directories it is.

The log of a rank has what its process says: how it ended and what it saw. The run is what all of them say together.
It is complete where every rank is, and a rank that was started and left nothing is told of, since silence would pass
for agreement.

A run is read while it is written or after, from oneself or from a stranger. The answer must be right or an error that
says what is wrong, whatever the bytes. Nothing is followed out of the directory, nothing is read without a limit,
nothing is believed before it is checked, and what is not whole does not exist.

Its source files are texts by name. That a file changed is told by its digest; what changed in it only by its text, and
by the time somebody asks, the file may be another one or gone. Secrets were taken out before: a text whose own digest
is not that of its name is not all that the file held. A store may be a stranger's: names that lead out of a directory
are left out.

Who waits for a run that is written looks again and again (`poll`). Between two looks a writer may be about to replace a
file, or all of the run. So a run may be unreadable some times in a row before that is an error; and who looks rests
longer than a look took, so that training has the machine.
"""

from __future__ import annotations

import datetime as dt
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from introspect_cli.errors import StoreError, scarcity
from introspect_cli.store import documents, tensorfile
from introspect_cli.store.files import (
    ATTEMPT_NAME,
    CHILDREN,
    FORMAT,
    LIMIT_DOCUMENT,
    MANIFEST,
    RANK_NAME,
    SOURCES,
    TENSORS,
    Closing,
    DamageError,
    Directory,
    reason,
)
from introspect_cli.store.log import newer_format
from introspect_cli.store.pack import from_anywhere, open_store
from introspect_cli.store.reader import RankReader, Shared, last_common_step
from introspect_cli.store.remote import is_remote
from introspect_cli.store.sources import SOURCE_NAME, decode
from introspect_cli.sums import hex_digest
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MANIFEST = MANIFEST.removesuffix(".json")
_TYPES = {
    **dict.fromkeys(("argv", "children", "failures", "not_observed", "notes", "observed"), list),
    **dict.fromkeys(("alone", "narrowing", "options", "tool"), dict),
}
"""What readers of a manifest take for granted; what is of another type was written by no capture, and is left out."""


class Settings(dict[str, Any]):
    """The settings documents of a rank, by name."""

    def document(self, name: str) -> dict[str, Any]:
        """The document `name` where it is a mapping; {} where it is missing or anything else."""
        found = self.get(name)
        return found if isinstance(found, dict) else {}


def settings_in(reader: RankReader) -> Settings:
    """The settings documents in a rank's log.

    Raises:
        StoreError: one is damaged.
    """
    every = sorted(reader.documents.items())
    return Settings(
        (name, documents.load(data, f"{reader.path} ({name})")) for name, data in every if name != _MANIFEST
    )


def read_rank_manifests(readers: Iterable[RankReader], run_id: object) -> dict[int, dict[str, Any]]:
    """The manifest of each rank in its log, by rank; a rank killed before it wrote one is left out.

    Raises:
        StoreError: one is damaged, belongs to another run, or a newer version wrote it.
    """
    manifests = {}
    for reader in readers:
        if _MANIFEST in reader.documents:
            manifests[reader.rank] = checked_manifest(reader.documents[_MANIFEST], f"{reader.path} (manifest)")
            if manifests[reader.rank].get("id") != run_id:
                raise DamageError(reader.path, "it belongs to another run than the manifest")
    return manifests


def last_attempt(folder: Directory) -> Directory:
    """The directory of the last `attemptN` that has a manifest, `folder` being closed.

    `folder` itself where there is none.
    """
    attempts = [int(match[1]) for match in map(ATTEMPT_NAME.fullmatch, folder.names()) if match]
    for number in sorted(attempts, reverse=True):
        attempt = folder.folder(f"attempt{number}")
        if MANIFEST in attempt:
            folder.close()
            return attempt
        attempt.close()
    return folder


def only_launch(folder: Directory) -> Directory | None:
    """The one child of a run that is a launch, opened; None where there is none, or more than one."""
    if CHILDREN not in folder:
        return None
    launches = []
    with folder.folder(CHILDREN) as children:
        for name in children.names():
            with children.folder(name) as child:
                if MANIFEST in child and launch_of(read_manifest(child)) is not None:
                    launches.append(name)
        return children.folder(launches[0]) if len(launches) == 1 else None


def read_manifest(folder: Directory) -> dict[str, Any]:
    """The manifest of the run in `folder`, checked and cleaned.

    Raises:
        DamageError: it is missing or was altered.
        StoreError: a newer version wrote it.
    """
    path = f"{folder.path}/{MANIFEST}"
    try:
        data = folder.read_file(MANIFEST, LIMIT_DOCUMENT)
    except FileNotFoundError:
        raise DamageError(path, "it is missing") from None
    manifest = checked_manifest(data, path)
    manifest.pop("crc32", None)
    if data != documents.sealed(manifest):
        raise DamageError(path, "it was altered")
    return manifest


def checked_manifest(data: bytes, path: str) -> dict[str, Any]:
    """The plain data of a manifest, cleaned, without keys of unexpected types; `path` is for messages.

    Raises:
        DamageError: it was altered, or names no format or an older one.
        StoreError: a newer version wrote it.
    """
    manifest = documents.load(data, path)
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if type(number) is not int or number < FORMAT:
        raise DamageError(path, "it does not say which format the run has")
    if number > FORMAT:
        raise newer_format(number, path)
    return {key: value for key, value in manifest.items() if isinstance(value, _TYPES.get(key, object))}


# --- the stages of a pipeline


@dataclass(frozen=True)
class Stages:
    """The pipeline stages that a rank ran, and the names of their modules in the whole model.

    The stages of one process are modules of one class, so all but the first have a number in their names: `GPT#2`. They
    are pieces of one model, whose layers have the names that they have in it.

    Attributes:
        last: number of one of them, which counts where a root is not known.
        of: how many the pipeline has.
        roots: numbers by the names of the stages' modules.
    """

    last: int
    of: int
    roots: Mapping[str, int] = field(default_factory=dict)

    def stage(self, root: str) -> int:
        """The stage number of a root module; `last` for an unknown one."""
        return self.roots.get(root, self.last)

    def name(self, fqn: str, distinct: frozenset[str] = frozenset()) -> str:
        """The name in the whole model of a rank's module, parameter or buffer: `GPT#2.h.0` is `GPT.h.0`.

        A name whose root is not among `roots` is left as it is.

        Args:
            fqn: its name in the rank.
            distinct: roots whose stages have different things under equal names; they keep theirs: `GPT[stage 1].h.0`.
        """
        root, dot, rest = fqn.partition(".")
        base = root.partition("#")[0]
        if root not in self.roots or (base != root and base not in self.roots):
            return fqn
        stage = f"[stage {self.roots[root]}]" if base in distinct and self.roots[root] else ""
        return f"{base}{stage}{dot}{rest}"


def stages_of(manifest: Mapping[str, Any]) -> Stages | None:
    """The pipeline stages that a rank's manifest names; None where there are none, or they are malformed."""
    pipeline = manifest.get("pipeline")
    given = pipeline if isinstance(pipeline, dict) else {}
    stage, of, roots = given.get("stage"), given.get("stages"), given.get("roots", {})
    numbers: list[Any] = [stage, *roots.values()] if isinstance(roots, dict) else [None]
    if type(of) is not int or not all(type(number) is int and 0 <= number < of for number in numbers):
        return None
    return Stages(numbers[0], of, roots)


# --- what the ranks say together

_LISTS = ("not_observed", "notes", "failures", "children")
_MAX_RANKS = 65536


def launch_of(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `launch` mapping of a manifest; None for a run of one process."""
    launch = manifest.get("launch")
    return launch if isinstance(launch, Mapping) else None


def world_size(manifest: Mapping[str, Any]) -> int:
    """How many ranks were started; 0 where the manifest does not say, or says over `_MAX_RANKS`."""
    launch = launch_of(manifest)
    size = launch.get("world_size") if launch is not None else None
    return size if type(size) is int and 0 < size <= _MAX_RANKS else 0


def merge_manifests(launch_manifest: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One manifest for a run: the lowest rank's where one process wrote it, else with the lists of all ranks joined.

    What the launch's manifest says takes the place of what the rank's does; `rank`, `local_rank` and `host` are left
    out. Exit code, exception, `how` and `raised_at` are those of the rank that failed first, by its end; without a
    failure, the lowest rank's. `steps` is the smallest number. The status is the first other than `complete` that a
    rank has; `interrupted` where a rank is missing, `running` without any; else `complete`.

    Args:
        launch_manifest: the run's own, which names the launch.
        ranks: each rank's, by number.
    """
    if not ranks:
        return {**launch_manifest, "status": "running"}
    first = ranks[min(ranks)]
    if launch_of(launch_manifest) is None:
        return {**first, **launch_manifest}
    every = list(ranks.values())
    out = {**first, **launch_manifest, "world_size": world_size(launch_manifest)}
    for name in ("rank", "local_rank", "host"):
        out.pop(name, None)
    unfinished = [str(manifest.get("status")) for manifest in every if manifest.get("status") != "complete"]
    missing = ["interrupted"] if len(ranks) < out["world_size"] else []
    out["status"] = next(iter((*unfinished, *missing)), "complete")
    for name in _LISTS:
        if any(name in manifest for manifest in every):
            out[name] = _listed(name, ranks)
    steps = [manifest["steps"] for manifest in every if type(manifest.get("steps")) is int]
    if steps:
        out["steps"] = min(steps)
    failing = [number for number, manifest in ranks.items() if manifest.get("exit_code") not in (None, 0)]
    if failing:  # where one ends, the others lose their connection to it
        failed = min(failing, key=lambda number: (str(ranks[number].get("ended") or "~"), number))
        out |= {name: ranks[failed].get(name) for name in ("exit_code", "how", "exception", "raised_at")}
    return out


def _listed(name: str, ranks: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """Entries listed by ranks under `name`, each once; a text listed only by some ends with `(ranks 0, 1)`."""
    sayers: dict[str, list[int]] = {}
    entries: dict[str, Any] = {}
    for number, manifest in sorted(ranks.items()):
        listed = manifest.get(name)
        for entry in listed if isinstance(listed, list) else ():
            sayers.setdefault(repr(entry), []).append(number)
            entries[repr(entry)] = entry
    return [
        f"{entry} ({rank_list(sayers[key])})" if isinstance(entry, str) and len(sayers[key]) < len(ranks) else entry
        for key, entry in entries.items()
    ]


# --- run


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
        self.manifest = read_manifest(folder)
        self._ranks = self._open_ranks(only)
        self.ranks = tuple(self._ranks)
        self._saying = self._ranks
        if launch_of(self.manifest) is None:  # the lowest rank says all, whoever is opened
            lowest = self._all_ranks[:1]
            self._saying = {n: self._ranks[n] if n in self._ranks else RankReader(folder, n) for n in lowest}
        manifests = read_rank_manifests(self._saying.values(), self.manifest.get("id"))
        self.manifests = {} if launch_of(self.manifest) is None else manifests
        self.manifest = merge_manifests(self.manifest, manifests)
        self.world_size = world_size(self.manifest) or self.combined_ranks or len(self.ranks)
        for reader in self._ranks.values():
            reader.rank_count = self.combined_ranks or 1
        self.left_out = frozenset(rank for rank, one in self.manifests.items() if one.get("left_out") is True)
        self.recorded = tuple(rank for rank in self.ranks if rank not in self.left_out) or self.ranks
        self.last_step = last_common_step(self._ranks[rank] for rank in self.ranks if rank not in self.left_out)
        self.steps = max(map(len, self._ranks.values()), default=0)
        named = ((rank, stages_of(manifest)) for rank, manifest in self.manifests.items())
        self.stages = {rank: stages for rank, stages in named if stages is not None}
        self.state = run_state(self.manifest, self.manifests, self._ranks.values())

    def spawned(self) -> Directory | None:
        """The only launch among the children of a run without steps of its own (`mp.spawn`), opened; None otherwise."""
        return None if any(map(len, self._ranks.values())) else only_launch(self._folder)

    def _open_ranks(self, only: Collection[int] | None) -> dict[int, RankReader]:
        """Open the readers of all ranks, or of those in `only`, by rank; sets `_all_ranks`.

        Raises:
            DamageError: a log is damaged, or belongs to another run.
        """
        matches = map(RANK_NAME.fullmatch, self._folder.names())
        self._all_ranks = sorted(int(match[1]) for match in matches if match)  # whoever of them is opened
        ranks = [rank for rank in self._all_ranks if only is None or rank in only]
        if len(ranks) > _MAX_RANKS:
            raise DamageError(self._folder.path, "it has more ranks than a run can have")
        self._folder.prefetch([f"rank{rank}" for rank in ranks])
        shared = Shared()
        readers = {rank: RankReader(self._folder, rank, shared=shared) for rank in ranks}
        for reader in readers.values():
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
        """How many ranks were combined into this run's one rank (`merge`); 0 for any other run."""
        whole = self.manifest.get("whole")
        size = whole.get("world_size") if isinstance(whole, dict) else None
        return size if isinstance(size, int) and size > 0 else 0

    @property
    def address(self) -> str:
        """The run's URL, or its absolute path."""
        return from_anywhere(self.path)

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
        """Sentences on ranks without a log, without a step, cut off at any step, or closed before the others' last.

        In that order, each with the first of the ranks that it is about.

        Empty while the run is being written, for a run of one rank, and for one put together from several.
        """
        if self.world_size < 2 or self.combined_ranks or self.state is RunState.RUNNING:
            return {}
        out: dict[str, int] = {}

        def say(ranks: list[int], what: str) -> None:
            if ranks:
                out[f"{rank_list(ranks)} of {self.world_size} {what}".replace("rank", "Rank", 1)] = ranks[0]

        last = {rank: self._ranks[rank].last_step for rank in self.ranks if rank not in self.left_out}
        say(sorted({*range(self.world_size)} - last.keys() - self.left_out), "left nothing")
        say([rank for rank, step in last.items() if step is None], "left no step")
        steps = sorted({step for step in last.values() if step is not None})
        for step in steps:
            ranks = [rank for rank, at in last.items() if at == step]
            cut = [rank for rank in ranks if not self._ranks[rank].ended]
            say(cut, f"{'was' if len(cut) == 1 else 'were'} cut off after step {step}")
            if step < steps[-1]:
                others = f"{count(steps[-1] - step, 'step')} before the others"
                say([rank for rank in ranks if rank not in cut], f"ended with step {step}, {others}")
        return out

    @cached_property
    def settings(self) -> Settings:
        """The settings documents by name; the lowest rank's, where each has its own."""
        return settings_in(self._saying[min(self._saying)]) if self._saying else Settings()

    def settings_of(self, rank: int) -> Settings:
        """The settings documents of one rank; the run's, where one process wrote it."""
        return settings_in(self._ranks[rank]) if rank in self.manifests else self.settings

    def tensor(self, checksum: int) -> NDArray[Any] | None:
        """A tensor that was stored in full, by its checksum; None where it was not.

        bfloat16, fp8 and complex32 come as the float32 or complex64 of the same value; element types numpy does
        not know as a flat uint8 array of their bytes. Where `load_tensor` is set, it alone is asked.
        """
        if self.load_tensor is not None:
            return self.load_tensor(checksum)
        tensor: NDArray[Any] | None = self._kept(TENSORS, f"{checksum:016x}.safetensors", tensorfile.of_file)
        return tensor

    def source(self, digest: str) -> bytes | None:
        """The bytes of a source file whose text is kept, by its digest; None where it is not.

        Raises:
            StoreError: its file is damaged.
        """
        data: bytes | None = self._kept(SOURCES, f"{digest}.gz", decode)
        return data

    @cached_property
    def kept_sources(self) -> frozenset[str]:
        """Digests of the source files whose text is kept.

        Raises:
            StoreError: their directory is damaged.
        """
        names = (name for folder in self._folders(SOURCES) for name in folder.names())
        return frozenset(match[1] for match in map(SOURCE_NAME.fullmatch, names) if match)

    def _kept(self, folder: str, name: str, read: Callable[[Directory, str], Any]) -> Any:
        """What `read` makes of a file in the first rank's `folder` that has it; None where none has."""
        for place in self._folders(folder):
            with suppress(FileNotFoundError):
                return read(place, name)
        return None

    @cached_property
    def _holders(self) -> dict[str, list[int]]:
        """The ranks that have whole tensors, and those that have sources, by the name of the directory."""
        holders: dict[str, list[int]] = {TENSORS: [], SOURCES: []}
        for rank in self._all_ranks:
            with self._folder.rank(rank) as place:
                for name in holders.keys() & {*place.names()}:
                    holders[name].append(rank)
        return holders

    def _folders(self, name: str) -> Iterator[Directory]:
        """The directories `name` of the ranks that have one, each closed when the next is asked for."""
        for rank in self._holders[name]:
            with self._folder.rank(rank) as place, place.folder(name) as folder:
                yield folder

    def on_close(self, then: Callable[[], None]) -> None:
        """Call `then` when the run is closed; the last added is called first."""
        self._on_close.append(then)

    def close(self) -> None:
        """Close all files; what was read stays valid."""
        for reader in (*self._ranks.values(), *self._saying.values()):
            reader.close()
        self._folder.close()
        while self._on_close:
            self._on_close.pop()()


def run_state(
    manifest: Mapping[str, Any], manifests: Mapping[int, Mapping[str, Any]], ranks: Iterable[RankReader]
) -> RunState:
    """RUNNING where a writer holds a lock; COMPLETE where the manifest says so and every rank ended; else INTERRUPTED.

    A rank whose log has not begun (`began`) and whose manifest says 0 steps (the run's, where it has none) need not
    have ended.

    Args:
        manifest: the run's.
        manifests: each rank's, by number; empty where one process wrote the run.
        ranks: the readers.
    """
    ranks = list(ranks)
    if any(rank.running for rank in ranks):
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


# --- source texts


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
        return hex_digest(self.data) == self.digest

    @property
    def text(self) -> str:
        """The file as text, in the encoding that it declares; as UTF-8 with replacement characters where that fails."""
        from importlib.util import decode_source

        try:
            return decode_source(self.data)
        except (SyntaxError, UnicodeDecodeError):
            return self.data.decode("utf-8", "replace")


class Sources(Mapping[str, Source]):
    """The source files of a run whose text it keeps, by name, each read when asked for."""

    def __init__(self, run: Run) -> None:
        """Read the names and digests of source files, and which texts are kept; names that lead outside are dropped.

        Raises:
            StoreError: the document or the directory of sources is damaged.
        """
        named = [(name, str(digest)) for name, digest in run.settings.document("sources").items()]
        self._run = run
        self.digests = {name: text for name, text in named if _DIGEST.fullmatch(text) and _stays_inside(name)}
        """Digest by name of all source files, whether their text is there or not."""
        kept = run.kept_sources if self.digests else frozenset()
        self._names = [name for name, digest in self.digests.items() if digest in kept]

    def __getitem__(self, name: str) -> Source:
        """The source file with a name, read from the store now.

        Raises:
            KeyError: its text is not there.
            StoreError: it is damaged.
        """
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


# --- poll


Seen = TypeVar("Seen")

PATIENCE = 5
"""How often in a row a run may be unreadable."""


def poll(
    path: str | Path,
    look: Callable[[Run], Seen],
    *,
    opened: Callable[..., Run] = open_run,
    pause: float = 1.0,
    rest: float = 0.0,
    between: Callable[[], Any] = lambda: None,
    unreadable: Callable[[], Any] = lambda: None,
) -> Seen:
    """Look at a run, opened anew each time, until it is no longer being written; returns what the last look gave.

    Args:
        path: the run.
        look: called with the opened run; what it returns at last is returned.
        opened: opens the run at a path.
        pause: the least number of seconds between two looks.
        rest: the pause is at least so many times as long as the look before it took.
        between: called after each look, also one that failed, with the run closed.
        unreadable: called where a look failed and will be tried again.

    Raises:
        StoreError: the run could not be read `PATIENCE` times in a row and once more.
    """
    failed = 0
    while True:
        began = time.monotonic()
        try:
            with opened(path) as run:
                over = run.state is not RunState.RUNNING
                seen = look(run)
            failed = 0
        except StoreError:
            failed += 1
            if failed > PATIENCE:
                raise
            over = False
            unreadable()
        between()
        if over:
            return seen
        time.sleep(max(pause, rest * (time.monotonic() - began)))

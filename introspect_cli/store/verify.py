"""Checks a whole run against itself and says what is damaged and what is still sound.

The reader checks only what it reads and stops at the first damage; somebody whose disk or transfer went wrong wants to
know what is left. Everything is read once, every CRC, digest, key and chain is computed again, and each thing that is
wrong becomes a finding instead of an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from introspect_cli.errors import StoreError
from introspect_cli.store import tensorfile
from introspect_cli.store.files import (
    ATTEMPT_NAME,
    CHILDREN,
    HEADS,
    MANIFEST,
    RANK_NAME,
    SOURCES,
    TENSORS,
    DamageError,
    Directory,
    outside_cause,
    reason,
)
from introspect_cli.store.log import CACHE, step_digest
from introspect_cli.store.pack import open_store
from introspect_cli.store.reader import LARGEST_HEADS, RankReader, last_common_step
from introspect_cli.store.run import (
    RunState,
    launch_of,
    merge_manifests,
    read_manifest,
    read_rank_manifests,
    run_state,
    settings_in,
)
from introspect_cli.store.sources import SOURCE_NAME, decode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


_TENSOR_NAME = re.compile(r"[0-9a-f]{16}\.safetensors")
_TEMPORARY = re.compile(r"\..*\.\d+")  # what a killed writer leaves of a file it had not yet finished
_KNOWN = (RANK_NAME.pattern, ATTEMPT_NAME.pattern, _TEMPORARY.pattern, *map(re.escape, (MANIFEST, CHILDREN)))
_TOP_LEVEL = re.compile("|".join(_KNOWN))

Result = TypeVar("Result")
_Checking = Callable[[Directory, str], Any]


@dataclass(frozen=True)
class VerifyReport:
    """Result of verifying a run.

    Attributes:
        path: the run's directory.
        state: whether it is being written, was closed properly, or ends where something stopped it.
        ranks: ranks whose log can be read.
        counts: how many `steps` of all ranks, `records` in them, `documents` (the manifest and the settings) and
            `tensors` are sound.
        last_step: last step that every rank has whole; None where there is none.
        findings: what is damaged, one sentence each.
    """

    path: str
    state: RunState
    ranks: int
    counts: Mapping[str, int]
    last_step: int | None
    findings: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.findings


def verify_run(path: str | Path) -> VerifyReport:
    """Check all of the run at `path` and the runs of its children; further attempts inside it are not looked at.

    Raises:
        StoreError: there is none, it is not a run, it is newer than this reader, or the system is out of resources or
            refuses permission. Damage is reported, not raised.
    """
    with open_store(path) as folder:
        return _Check(folder).report()


class _Check:
    """Checks every part of a run and collects the findings.

    Attributes:
        findings: what is damaged, one sentence each.
        sound: how many `steps`, `records`, `documents` and `tensors` are sound.
    """

    def __init__(self, folder: Directory, *, is_child: bool = False) -> None:
        """Keep the directory; `report` checks it.

        Args:
            folder: the run's.
            is_child: whether it is a run below `children`, which has no children itself.
        """
        self._is_child = is_child
        self.findings: list[str] = []
        self.sound = Counter[str]()
        self._folder = folder

    def report(self) -> VerifyReport:
        """Check the manifest, all ranks, documents, sources, tensors and child runs, once; damage becomes a finding.

        Raises:
            StoreError: the system is out of resources or refuses permission, or a newer version wrote the run.
        """
        manifest: dict[str, Any] = self._try(read_manifest, self._folder) or {}
        run_id, numbers = manifest.get("id"), self._check_top_level()
        ranks = [reader for number in numbers if (reader := self._check_rank(number, run_id)) is not None]
        manifests: dict[int, dict[str, Any]] = {}
        for reader in ranks:
            manifests |= self._try(read_rank_manifests, [reader], run_id) or {}
            self.sound["documents"] += len(self._try(settings_in, reader) or ())
            reader.close()
        self.sound["documents"] += bool(manifest) + len(manifests)
        launched = launch_of(manifest) is not None
        if manifest and not launched and not manifests:
            self.findings.append(f"{self._folder.path}: the log that says what ran is missing")
        manifest = merge_manifests(manifest, manifests)
        state = run_state(manifest, manifests if launched else {}, ranks)
        if manifest.get("status") == "complete" and state is RunState.INTERRUPTED and len(ranks) == len(numbers):
            self.findings.append(f"{self._folder.path}: the manifest says that it is complete, but its end is cut off")
        for place in filter(None, (self._try(self._folder.rank, number) for number in numbers)):
            self._check_files(place, TENSORS, _TENSOR_NAME, tensorfile.of_file)
            self._check_files(place, SOURCES, SOURCE_NAME, decode)
        if not self._is_child:  # they have none themselves
            self._check_files(self._folder, CHILDREN, re.compile(".*"), self._check_child)
        last = last_common_step(ranks)
        return VerifyReport(self._folder.path, state, len(ranks), self.sound, last, tuple(self.findings))

    def _check_child(self, folder: Directory, name: str) -> None:
        """Check the run of a process that the script started, and take over its findings."""
        with folder.folder(name) as child:
            for finding in _Check(child, is_child=True).report().findings:
                self.findings.append(finding)

    def _try(self, action: Callable[..., Result], *given: Any) -> Result | None:
        """The result of `action(*given)`; None where it fails, with a finding unless a file is missing.

        Raises:
            StoreError: the system is out of resources or refuses permission, or a newer version wrote the run.
        """
        try:
            return action(*given)
        except DamageError as error:
            self.findings.append(error.finding)
        except FileNotFoundError:
            pass
        except OSError as error:
            if outside_cause(error):
                raise StoreError(f"cannot read {self._folder.path}: {outside_cause(error)}") from None
            self.findings.append(f"{self._folder.path}: {reason(error)}")
        return None

    def _check_top_level(self) -> list[int]:
        """Numbers of the ranks, sorted; any entry that is no part of a run, nor a temporary file, is a finding."""
        names = self._folder.names()
        for name in names:
            if not _TOP_LEVEL.fullmatch(name):
                self.findings.append(f"{self._folder.path}: {name!a} is not part of a run")
        return sorted(int(match[1]) for match in map(RANK_NAME.fullmatch, names) if match)

    def _check_rank(self, number: int, run_id: object) -> RankReader | None:
        """Check one rank and count its sound steps and records.

        Returns its reader, closed, or None where its log cannot be opened.
        """
        if (reader := self._try(lambda: RankReader(self._folder, number, damaged=True))) is None:
            return None
        if reader.cut:
            self.findings.append(f"{reader.frames.path}: {reader.cut}")
        if reader.run_id and reader.run_id.hex() != run_id:
            self.findings.append(f"{reader.path}: it belongs to another run than the manifest")
        for table in ("sites", "layouts", "modules", "labels"):
            self._try(getattr, reader, table)
        for row in range(len(reader)):
            if (rows := self._try(_check_step, reader, row)) is not None:
                self.sound.update(steps=1, records=rows)
        self._try(reader.frames.check_chain)
        self._try(_check_heads, self._folder, reader)
        reader.close()
        return reader

    def _check_files(self, place: Directory, name: str, pattern: re.Pattern[str], check: _Checking) -> None:
        """Check the files of a directory; sound ones are counted in `sound[name]`.

        Does nothing where there is no such directory.

        Args:
            place: where the directory is.
            name: of the directory.
            pattern: the names that its files have; another name is a finding.
            check: called with the directory and a file's name; raises DamageError.
        """
        if (folder := self._try(place.folder, name)) is None:
            return
        with folder:
            for file in folder.names():
                if pattern.fullmatch(file):
                    self.sound[name] += self._try(lambda f=folder, n=file: (check(f, n), True)) is not None
                elif not _TEMPORARY.fullmatch(file):
                    self.findings.append(f"{folder.path}: {file!a} is not part of a run")


def _check_step(reader: RankReader, row: int) -> int:
    """Number of records in a step; DamageError where its digest differs from the one computed again."""
    batch, sites = reader.read_row(row), reader.sites
    digest = step_digest(sites.key[batch.site], batch.checksum, batch.status, sites.setting[batch.site])
    entry = reader.entry(row)
    if digest != entry.digest:
        what = f"the records of step {entry.step} do not add up to the digest that they were written with"
        raise DamageError(reader.frames.path, what)
    return len(batch)


def _check_heads(run: Directory, reader: RankReader) -> None:
    """Raise DamageError unless the file of heads equals one made from the log's first frames, as many as it has.

    FileNotFoundError where there is no such file.
    """
    with run.rank(reader.rank) as folder:
        data = folder.read_file(HEADS, LARGEST_HEADS)
    count = CACHE.unpack_from(data)[2] if len(data) >= CACHE.size else 0
    if data != reader.frames.encoded(count):
        raise DamageError(f"{reader.path}/{HEADS}", "it is not what the log has: remove it")

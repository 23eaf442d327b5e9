"""The ranks of one launch, recorded on disks that the machines do not share, put together into one run.

Every machine has a run of its own with the ranks that ran there, all under one id. Their files are copied as they are
into a new directory, which gets its name when it is whole.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.store.files import MANIFEST, reason
from introspect_cli.store.launch import launch_of
from introspect_cli.store.manifests import read_manifest
from introspect_cli.store.pack import files_of, local, open_store
from introspect_cli.store.reader import RunState, open_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PLACE = re.compile(r"((?:attempt\d+/)?)(?:rank(\d+)/)?(.+)")


def merge(sources: Sequence[str | Path], out: Path, *, texts: bool = True) -> list[int]:
    """Copy the ranks of one launch into one run.

    Args:
        sources: directories of runs, each with some of the ranks, packs of them, or URLs.
        out: the directory of the run, which must not exist.
        texts: whether the text of source files goes with them.

    Returns:
        the ranks of the last attempt, rising.

    Raises:
        StoreError: a source is no run of a launch, is of another launch or still being written, two have the same rank,
            or `out` exists or cannot be written.
    """
    if out.exists():
        raise StoreError(f"{out} exists: choose another directory with -o")
    jobs = [_job(source) for source in sources]
    for source, job in zip(sources, jobs, strict=True):
        if job != jobs[0]:
            raise StoreError(f"{source} is of another launch than {sources[0]}: only ranks of one launch make a run")
    with whole_or_nothing(out) as fresh:
        _copy(sources, fresh, texts=texts)
        with open_run(fresh) as run:
            ranks = list(run.ranks)
    return ranks


@contextmanager
def whole_or_nothing(out: Path) -> Iterator[Path]:
    """A directory to fill that gets the name `out` when it is whole, and is removed where anything fails.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            yield fresh
            fresh.chmod(0o755)
            fresh.rename(out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {reason(error)}; choose another place with -o") from None


def _job(source: str | Path) -> str:
    """What all runs of a launch have in common."""
    with open_run(source) as run:
        launch = launch_of(run.manifest)
        if launch is None:
            raise StoreError(f"{source} is a run of one process: merge takes runs of ranks that a launcher started")
        if run.state is RunState.RUNNING:
            raise StoreError(f"{source} is still being written: wait for its end, then merge")
        return str(launch.get("job"))


def _copy(sources: Sequence[str | Path], fresh: Path, *, texts: bool) -> None:
    held: dict[tuple[str, str], str | Path] = {}
    ids: dict[str, tuple[str, Path]] = {}
    with ExitStack() as stack:
        for source in sources:
            path = stack.enter_context(local(source))
            for name, file in files_of(path, sources=texts):
                match = _PLACE.fullmatch(name)
                assert match is not None
                attempt, rank, _ = match.groups()
                if rank is not None:
                    other = held.setdefault((attempt, rank), source)
                    if other != source:
                        raise StoreError(f"rank {rank} is both in {other} and in {source}: leave one of them out")
                    _same_id(ids, attempt, path, source)
                target = fresh / name
                target.parent.mkdir(parents=True, exist_ok=True)
                # What is of no rank says the same everywhere; the manifest of a level goes with the first rank there.
                if rank is not None or not target.exists():
                    shutil.copyfile(file, target)
        for attempt, (_, path) in ids.items():
            shutil.copyfile(path / attempt / MANIFEST, fresh / attempt / MANIFEST)


def _same_id(ids: dict[str, tuple[str, Path]], attempt: str, path: Path, source: str | Path) -> None:
    """That the ranks of an attempt are of one run."""
    if attempt in ids and ids[attempt][1] == path:
        return
    with open_store(path / attempt) as folder:
        run_id = str(read_manifest(folder).get("id"))
    first_id, first = ids.setdefault(attempt, (run_id, path))
    if first_id != run_id:
        raise StoreError(f"{source} is of another launch than {first}: only ranks of one launch make a run")

"""A run that several processes write, a rank each: its directory, and what the ranks' manifests say together.

Ranks start, end and die when they like, on machines that share a disk or do not, and training may wait for none of them
because of a capture. Each rank computes the same id from what its launcher told it. Whoever comes first makes the
directory and a manifest that names the launch; a file appears whole or not at all, so it does not matter who that is.
From then on a rank writes inside `rankK/` alone: its own manifest, settings, tensors and lock. Nobody waits for
anybody, and readers put the ranks together: each rank says how it ended and what it saw, and the run is what all of
them say. It is complete where every rank is, and a rank that was started and left nothing is told of, since silence
would pass for agreement.

A launcher that restarts its processes begins another attempt, a run of its own in `attemptN/`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError
from introspect_cli.store import documents
from introspect_cli.store.files import FORMAT, LOCK, MANIFEST, Folder, write_all
from introspect_cli.texts import count
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

ATTEMPT_NAME = re.compile(r"attempt([1-9]\d{0,3})")
_ATTEMPTS = 50

IN_FLIGHT = "collectives.txt"
"""A rank's file of the collectives that began in the step under way; gone once the rank has ended."""

_LISTS = ("not_observed", "notes", "failures", "children")
_MAX_WORLD = 65536
_SHOWN = 8


@dataclass(frozen=True)
class Launch:
    """Which part of a run this process writes.

    Attributes:
        id: 32 hex digits, the same on every rank and of no other launch or attempt.
        job: the same for all attempts of a launch.
        rank: this process.
        world_size: how many there are.
        attempt: how often the launcher has restarted them.
        local_rank: this process among those of its machine; None where the launcher does not say.
    """

    id: str
    job: str
    rank: int
    world_size: int
    attempt: int = 0
    local_rank: int | None = None


def joined(path: Path, launch: Launch, set_aside: Callable[[Path], Path | None]) -> Path:
    """Make or find the directory of a launch; the directory in it that is this rank's.

    Args:
        path: the run's directory.
        launch: this process's part.
        set_aside: moves away another run that may be replaced, and says where to; refuses one that may not.

    Raises:
        StoreError: another run is there, or this rank has been written already.
    """
    if launch.attempt:
        _join(path, launch, set_aside, first_attempt=True)
        path = path / f"attempt{launch.attempt}"
        path.mkdir(exist_ok=True)
    _join(path, launch, set_aside)
    rank = path / f"rank{launch.rank}"
    if rank.is_dir() and any(name != LOCK for name in os.listdir(rank)):  # noqa: PTH208 -- names alone
        old = set_aside(rank)
        if old is not None:
            import shutil

            shutil.rmtree(old, ignore_errors=True)
    return rank


def _join(path: Path, launch: Launch, set_aside: Callable[[Path], Path | None], *, first_attempt: bool = False) -> None:
    for _ in range(_ATTEMPTS):
        ids = _launch_at(path)
        if ids is not None and launch.job in ids and (first_attempt or launch.id in ids):
            return
        if ids is None:
            path.mkdir(parents=True, exist_ok=True)
            _announce(path, launch)
            continue
        old = set_aside(path)
        if old is not None:
            import shutil

            shutil.rmtree(old, ignore_errors=True)
    raise StoreError(f"{path} is being written by another launch; choose another directory")


def _launch_at(path: Path) -> tuple[str, ...] | None:
    """Id and job of the launch at a path, empty for any other run or thing; None where nothing is."""
    try:
        folder = Folder.at(str(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return ()
    with folder:
        names = [name for name in folder.names() if not name.startswith(f".{MANIFEST}.")]
        if names in ([], [LOCK]):
            return None
        try:
            data = folder.read_file(MANIFEST, 1 << 16)
            manifest = documents.load(data, f"{path}/{MANIFEST}")
        except (FileNotFoundError, StoreError):
            return ()
        launch = manifest.get("launch") if isinstance(manifest, dict) else None
        return (str(manifest["id"]), str(launch.get("job"))) if isinstance(launch, dict) and "id" in manifest else ()


def _announce(path: Path, launch: Launch) -> None:
    """Write the manifest of a launch, unless another rank has."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "id": launch.id,
        "tool": {"name": "introspect-cli", "version": __version__},
        "launch": {"world_size": launch.world_size, "attempt": launch.attempt, "job": launch.job},
    }
    temporary = f".{MANIFEST}.{launch.rank}{os.getpid()}"
    with Folder.at(str(path)) as folder:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder.fd)
        fd = folder.create(temporary, 0o600)
        try:
            write_all(fd, [documents.dump(manifest, MANIFEST, launch.id)])
        finally:
            os.close(fd)
        with suppress(FileExistsError):
            os.link(temporary, MANIFEST, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        os.unlink(temporary, dir_fd=folder.fd)


# --- what the ranks' manifests say


def launch_of(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a run's manifest says of its launch; None for a run that one process wrote."""
    launch = manifest.get("launch")
    return launch if isinstance(launch, Mapping) else None


def world_size(manifest: Mapping[str, Any]) -> int:
    """How many ranks were started; 0 where the manifest does not say."""
    launch = launch_of(manifest)
    size = launch.get("world_size") if launch is not None else None
    return size if type(size) is int and 0 < size <= _MAX_WORLD else 0


def merged(launch_manifest: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One manifest for the run: the lowest rank's, with what any rank says of how it ended and what it did not see."""
    if not ranks:
        return {**launch_manifest, "status": "running"}
    first = ranks[min(ranks)]
    every = list(ranks.values())
    out = {**first, **launch_manifest, "world_size": world_size(launch_manifest)}
    for name in ("rank", "local_rank", "host"):
        out.pop(name, None)
    complete = len(ranks) >= out["world_size"] and all(manifest.get("status") == "complete" for manifest in every)
    out["status"] = "complete" if complete else next((s for s in _statuses(every) if s != "complete"), "interrupted")
    for name in _LISTS:
        if any(name in manifest for manifest in every):
            out[name] = _together(name, ranks)
    steps = [manifest["steps"] for manifest in every if type(manifest.get("steps")) is int]
    if steps:
        out["steps"] = min(steps)
    failed = next((n for n, manifest in sorted(ranks.items()) if manifest.get("exit_code") not in (None, 0)), None)
    if failed is not None:
        out |= {name: ranks[failed].get(name) for name in ("exit_code", "how", "exception", "raised_at")}
    return out


def _statuses(manifests: list[Mapping[str, Any]]) -> list[str]:
    return [str(manifest.get("status")) for manifest in manifests]


def _together(name: str, ranks: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """What the ranks list, each entry once; of what only some say, which."""
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


def group_label(ranks: list[int]) -> str:
    """What a group of ranks is called: `ranks 0-3`, `ranks 0,2,4`, `ranks 0-4094/2`."""
    if not ranks:
        return "no ranks"
    steps = {two - one for one, two in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and min(steps) > 0:
        stride = min(steps)
        return f"ranks {ranks[0]}-{ranks[-1]}{f'/{stride}' if stride > 1 else ''}"
    shown = ",".join(map(str, ranks[:_SHOWN]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f",... ({len(ranks)})" if len(ranks) > _SHOWN else "")


def group_size(label: str) -> int | None:
    """How many ranks a group of that name has; None where the name does not tell."""
    match = re.fullmatch(r"ranks? (\d+)(?:-(\d+)(?:/(\d+))?|((?:,\d+)+)(?:,\.\.\. \((\d+)\))?)?(?: #\d+)?", label)
    if match is None:
        return None
    first, last, stride, more, all_ = match.groups()
    if last is not None:
        return (int(last) - int(first)) // int(stride or 1) + 1 if int(stride or 1) else None
    return int(all_) if all_ else 1 + (more or "").count(",")


def rank_list(ranks: list[int]) -> str:
    """`rank 3`, `ranks 1, 2`."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def endings(
    size: int,
    last: Mapping[int, int | None],
    ended: Mapping[int, bool],
    left_out: Collection[int] = (),
    unfinished: Collection[int] | None = None,
) -> list[str]:
    """Sentences on ranks that left nothing, or that ended before the others.

    Args:
        size: how many ranks there are.
        last: the last step of each that is there.
        ended: whether each ended by itself.
        left_out: those that were to record nothing.
        unfinished: of a run in object storage, those of which not all was sent; None of one on disk.
    """
    out = []
    left = "left" if unfinished is None else "sent"
    absent = [rank for rank in range(size) if rank not in last and rank not in left_out]
    if absent:
        out.append(f"{rank_list(absent)} of {size} {left} nothing".replace("rank", "Rank", 1))
    silent = [rank for rank, step in last.items() if step is None]
    if silent:
        out.append(f"{rank_list(silent)} of {size} {left} no step".replace("rank", "Rank", 1))
    ended_with = {rank: step for rank, step in last.items() if step is not None}
    latest = max(ended_with.values(), default=-1)
    by_step: dict[int, list[int]] = {}
    for rank, step in ended_with.items():
        if step < latest or not ended[rank]:
            by_step.setdefault(step, []).append(rank)
    for step, ranks in sorted(by_step.items()):
        unsent = [rank for rank in ranks if rank in (unfinished or ())]
        if unsent:
            out.append(
                f"What {rank_list(unsent)} of {size} sent ends with step {step}: its last pieces may be missing, and "
                "more may lie where it was recorded"
            )
        cut = [rank for rank in ranks if not ended[rank] and rank not in unsent]
        if cut:
            was = "was" if len(cut) == 1 else "were"
            out.append(f"{rank_list(cut)} of {size} {was} cut off after step {step}".replace("rank", "Rank", 1))
        whole = [rank for rank in ranks if ended[rank]]
        if whole:
            others = count(latest - step, "step")
            out.append(
                f"{rank_list(whole)} of {size} ended with step {step}, {others} before the others".replace(
                    "rank", "Rank", 1
                )
            )
    return out


# --- stages of a pipeline


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline that a rank ran, and what their modules are called in the whole model.

    The stages of one process are modules of one class, so all but the first have a number in their names: `GPT#2`. They
    are pieces of one model, whose layers have the names that they have in it.

    Attributes:
        last: number of one of them, which counts where a root is not known.
        of: how many the pipeline has.
        roots: numbers by the names of the stages' modules.
    """

    last: int
    of: int
    roots: tuple[tuple[str, int], ...] = ()

    @cached_property
    def _by_root(self) -> dict[str, int]:
        return dict(self.roots)

    def stage(self, root: str) -> int:
        """The stage of a root module."""
        return self._by_root.get(root, self.last)

    def name(self, fqn: str, distinct: frozenset[str] = frozenset()) -> str:
        """What a module, parameter or buffer of the rank is called in the whole model.

        Args:
            fqn: its name in the rank.
            distinct: roots whose stages have different things under equal names, which then tell the stage.
        """
        root, dot, rest = fqn.partition(".")
        base, roots = root.partition("#")[0], self._by_root
        if root not in roots or (base != root and base not in roots):
            return fqn
        stage = f"[stage {roots[root]}]" if base in distinct and roots[root] else ""
        return f"{base}{stage}{dot}{rest}"


def stages_in(manifests: Mapping[int, Mapping[str, Any]]) -> dict[int, Stages]:
    """The stages of each rank that names some, given the ranks' manifests."""
    return {rank: stages for rank, manifest in manifests.items() if (stages := stages_of(manifest)) is not None}


def stages_of(manifest: Mapping[str, Any]) -> Stages | None:
    """The stages that a rank's manifest names; None where it names none."""
    pipeline = manifest.get("pipeline")
    if not isinstance(pipeline, dict):
        return None
    stage, of, roots = pipeline.get("stage"), pipeline.get("stages"), pipeline.get("roots", {})
    if type(stage) is not int or type(of) is not int or not 0 <= stage < of or not isinstance(roots, dict):
        return None
    if not all(isinstance(root, str) and type(number) is int and 0 <= number < of for root, number in roots.items()):
        return None
    return Stages(stage, of, tuple(sorted(roots.items())))

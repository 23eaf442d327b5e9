"""Which part of which run this process writes: what its launcher says (torchrun and the like, mpirun, srun), and where.

Every rank has to come to the same id without a word to the others, and two launches to different ones. So the id is a
hash over what a launcher gives to all its processes alike. One process has a directory, or all of a launch have one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.store.files.folders import RUNS
from introspect_cli.store.write.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from introspect_cli.script.target import Target


class Launcher(NamedTuple):
    """The environment variables of one launcher.

    Attributes:
        rank: holds this process's number.
        world_size: holds how many there are.
        local_rank: holds this process's number on its machine.
        job: tell one launch from another, as far as they are set.
    """

    rank: str
    world_size: str
    local_rank: str
    job: tuple[str, ...]


SPAWNED = Launcher("INTROSPECT_SPAWN_RANK", "INTROSPECT_SPAWN_SIZE", "INTROSPECT_SPAWN_RANK", ("INTROSPECT_SPAWN",))
"""Set by ourselves while `torch.multiprocessing.spawn` starts a process that is followed: it tells nobody else."""

_GROUPS = "torch.distributed.distributed_c10d"

LAUNCHERS = (
    SPAWNED,
    Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("PMI_JOBID", "PMI_PORT", "HYDI_CONTROL_FD")),
    # A batch script has SLURM_NTASKS as well and is one process: only srun counts the tasks of a step.
    Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
"""Asked in this order: torchrun may itself have been started by srun."""


def spawn_variables(rank: int, world_size: int, job: str) -> dict[str, str]:
    """Environment variables that tell a process which `torch.multiprocessing.spawn` starts what rank it is."""
    return {SPAWNED.rank: str(rank), SPAWNED.world_size: str(world_size), SPAWNED.job[0]: job}


def forget_spawned() -> None:
    """Drop the variables of `SPAWNED` from the environment, so that processes below this one are no ranks."""
    for name in (SPAWNED.rank, SPAWNED.world_size, *SPAWNED.job):
        os.environ.pop(name, None)


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Launch of this process, by the variables of the first launcher in `LAUNCHERS` that gives a valid rank and size.

    Args:
        environment: the variables.

    Returns:
        None where none does, and for a launch of one process.
    """
    for launcher in LAUNCHERS:
        rank, size = _number_in(environment, launcher.rank), _number_in(environment, launcher.world_size)
        if rank is None or size is None or not 0 <= rank < size:
            continue
        if size == 1:
            return None
        attempt = _number_in(environment, "TORCHELASTIC_RESTART_COUNT") or 0
        job = _digest_of(_job_words(environment, launcher))
        identity = _digest_of((job, str(size), str(attempt)))
        return Launch(identity, job, rank, size, attempt, _number_in(environment, launcher.local_rank))
    return None


def rank_and_size() -> tuple[int, int] | None:
    """Rank and world size of torch's process group; None without one or in a group of one.

    For processes that no launcher told it at their start, such as those of a script that starts its ranks itself.
    """
    if not is_grouped():
        return None
    home = sys.modules[_GROUPS]
    return (home.get_rank(), home.get_world_size()) if home.get_world_size() > 1 else None


def is_grouped() -> bool:
    """Whether this process is in a process group of torch's; torch is not imported to find out."""
    home = sys.modules.get(_GROUPS)
    return home is not None and home.is_initialized()


def _job_words(environment: Mapping[str, str], launcher: Launcher) -> tuple[str, ...]:
    """Words that tell one launch from another: torchelastic's run id where it is set, else the launcher's variables."""
    elastic = environment.get("TORCHELASTIC_RUN_ID", "none")
    if launcher.rank == "RANK" and elastic != "none":
        return (elastic,)  # an address and a port are chosen anew when the agent restarts its processes
    return tuple(f"{name}={environment.get(name, '')}" for name in launcher.job)


def _digest_of(words: tuple[str, ...]) -> str:
    """Digest of words, 32 hex digits."""
    text = "\n".join(words).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _number_in(environment: Mapping[str, str], name: str) -> int | None:
    """An environment variable as a number of 1 to 6 digits; None for any other text, or without it."""
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else None


def run_directory(target: Target | None, asked: Path | None, launch: Launch | None) -> Path:
    """Where a run is written: the directory that was asked for, else a fresh one, the same for all ranks of a launch.

    A fresh one of a single process is made; of a launch, a marker file beside it is written.

    Args:
        target: what runs, for the name.
        asked: the directory asked for; None for a fresh one.
        launch: the launch; None for a single process.
    """
    if asked is not None:
        return asked
    return new_run(target) if launch is None else _shared_run(target, launch)


def _shared_run(target: Target | None, launch: Launch) -> Path:
    """Path of a fresh run, the same for all ranks: the first rank to come writes its name into a marker file.

    A rank that has its directory in that run already takes the next marker: it captures another script.
    """
    runs, number = Path(RUNS), 1
    while True:
        marker = runs / (f".launch-{launch.job[:16]}" + (f"-{number}" if number > 1 else ""))
        try:
            path = runs / _write_once(marker, fresh_run(target).name)
        except OSError:
            return fresh_run(target)  # whoever opens the store says what stands in the way
        attempt = path / f"attempt{launch.attempt}" if launch.attempt else path
        if not (attempt / f"rank{launch.rank}").exists():
            return path
        number += 1  # this rank has captured a script under this launcher before


def _write_once(marker: Path, name: str) -> str:
    """Content of a marker file, which is written with `name` if there is none; safe among ranks that come at once."""
    marker.parent.mkdir(parents=True, exist_ok=True)
    temporary = marker.with_name(f"{marker.name}.{os.getpid()}")
    temporary.write_text(name)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, marker)
    temporary.unlink()
    return Path(marker.read_text()).name


def fresh_run(target: Target | None) -> Path:
    """A path in `introspect-runs/` that does not exist yet: `train-20250131-120000`, else with `-2`, `-3`, ..."""
    of = "" if target is None else target.module or Path(target.script or "").stem
    stem = f"{of or 'run'}-{dt.datetime.now().strftime('%Y%m%d-%H%M%S')}"  # noqa: DTZ005 - the user's own clock, for the user
    path, number = Path(RUNS) / stem, 1
    while path.exists():
        number += 1
        path = Path(RUNS) / f"{stem}-{number}"
    return path


def new_run(target: Target | None) -> Path:
    """Make a fresh directory (`fresh_run`), so that captures in the same second differ; only its path if that fails."""
    while True:
        path = fresh_run(target)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                return path  # whoever opens the store says what stands in the way
            continue
        except OSError:
            return path  # as above
        return path

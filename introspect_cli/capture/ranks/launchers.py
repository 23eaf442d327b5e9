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

from introspect_cli.store.files import RUNS
from introspect_cli.store.run_writer import Launch

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
"""Set by ourselves in processes of `torch.multiprocessing.spawn` that are followed: it tells nobody else."""

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
    """Words that tell one launch from another: torchrun's run id, unless that is `none`; else `NAME=value` of `job`."""
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

    A fresh one of a single process is made (`new_run`). That of a launch is not: it is named by the launch, and
    numbered where this rank has captured a script under it before.

    Args:
        target: what runs, for the name.
        asked: the directory asked for; None for a fresh one.
        launch: the launch; None for a single process.
    """
    if asked is not None:
        return asked
    if launch is None:
        return new_run(target)
    part = f"attempt{launch.attempt}/rank{launch.rank}" if launch.attempt else f"rank{launch.rank}"
    return _unused(f"{_stem(target)}-{launch.job[:12]}", part)


def _stem(target: Target | None) -> str:
    """What the name of a run begins with: the module, else the script's file name without suffix, else `run`."""
    return (target.module or Path(target.script or "").stem if target is not None else "") or "run"


def _unused(name: str, part: str = "") -> Path:
    """The first of `introspect-runs/NAME`, `NAME-2`, ... that does not exist, or, with `part`, does not contain it."""
    path, number = Path(RUNS) / name, 1
    while (path / part).exists():
        number += 1
        path = Path(RUNS) / f"{name}-{number}"
    return path


def new_run(target: Target | None) -> Path:
    """Make a fresh directory in `introspect-runs/`: `train-20250131-120000`, else with `-2`, `-3`, ...

    Captures in the same second differ. Where it cannot be made, only its path is returned.
    """
    while True:
        path = _unused(f"{_stem(target)}-{dt.datetime.now().strftime('%Y%m%d-%H%M%S')}")  # noqa: DTZ005 - the user's own clock, for the user
        with contextlib.suppress(OSError):
            path.mkdir(parents=True)
            return path
        if not path.is_dir():
            return path  # whoever opens the store says what stands in the way

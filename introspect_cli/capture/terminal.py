"""What a capture says on stderr: warnings, and at the end what was recorded."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.store.files import CHILDREN
from introspect_cli.texts import count, human_size

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.capture.all_probes import Probes
    from introspect_cli.store.run_writer import Launch


class Terminal:
    """Writes sentences to stderr."""

    def __init__(self, launch: Launch | None, *, quiet: bool) -> None:
        """Open nothing; `say` writes later, and never if `quiet`.

        `launch` gives the rank that each sentence begins with.
        """
        self._quiet = quiet
        self._who = f"introspect, rank {launch.rank}" if launch is not None else "introspect"

    def say(self, sentence: str) -> None:
        """Write `introspect[, rank N]: sentence` to stderr at once, nothing if `quiet`.

        A stderr that is closed is ignored.
        """
        if not self._quiet:
            with contextlib.suppress(AttributeError, OSError, ValueError, UnicodeError):
                sys.stderr.write(f"{self._who}: {sentence}\n")
                sys.stderr.flush()


def nothing_recorded(path: Path, *, installed: bool) -> str:
    """Last sentence of a run without probes.

    `installed` False means that installing them failed, else torch never came.
    """
    why = "the script never imported torch" if installed else "the probes could not be installed"
    return f"{why}, so nothing was recorded; {path} holds its settings only"


def summary(path: Path, launch: Launch | None, probes: Probes, manifest: dict[str, Any], *, lost: bool) -> str:
    """Last sentence of a run, for the terminal: steps, records, size, directory; or that nothing was recorded.

    Args:
        path: the run's directory.
        launch: this process's part in a distributed run; None for a run of one process.
        probes: what has recorded; asked for their counts.
        manifest: as written at the end; its `steps` and `remainder` are read.
        lost: whether the store could not be written to the end; then the sentence says up to which step it can be read.
    """
    if lost:
        written, last = probes.recorder.steps_written, probes.rank.last_step
        if last is None or not path.exists():
            return f"recorded {count(written, 'step')} in {path}, then the store was lost"
        return f"{count(written, 'step')} up to step {last} can be read in {path}; then the store was lost"
    steps, rows = manifest.get("steps", 0), probes.rank.rows_written
    if not rows and (path / CHILDREN).is_dir():
        return f"recorded what the processes that the script started trained in {path}"
    if not rows:
        return f"no module was called and no optimizer stepped while recording; {path} has no records"
    size = human_size(probes.rank.bytes_written)
    if launch is not None:
        size += f"; this is rank {launch.rank} of {launch.world_size}"
    rest = " and what came after" if manifest.get("remainder") else ""
    if probes.policy.dropped:
        rest += f" and dropped {probes.policy.dropped:,} of them again"
    if probes.perturbed is not None:
        moved = probes.perturbed.document
        which = f"{count(moved['elements'], 'number')} in {count(moved['parameters'], 'parameter')}"
        rest += f" after --perturb {moved['seed']} moved {which} by one rounding"
    return f"recorded {count(steps, 'step')}{rest}, {count(rows, 'record')} ({size}) in {path}"

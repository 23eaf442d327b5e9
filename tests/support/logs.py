"""Logs of ranks taken apart and written anew, for tests of what only some writers leave."""

from __future__ import annotations

from introspect_cli.store.files import HEADS, LOG, Folder
from introspect_cli.store.log import Frames
from introspect_cli.store.rank_writer import Frame, LogWriter


def frames_of(rank):
    """The run's id and the frames of a rank's log, given its directory."""
    with Folder.at(str(rank)) as folder, folder.file(LOG) as log:
        read = Frames(log, int(rank.name.removeprefix("rank")), log.path)
        frames = [
            Frame(
                bytes(head["kind"]),
                [read.body(number)],
                int(head["rows"]),
                int(head["step"]),
                head["digest"].tobytes(),
            )
            for number, head in enumerate(read.heads)
        ]
    return read.run_id, frames


def rewrite(rank, change):
    """Write a rank's log anew with what `change` makes of each of its frames: a list of frames."""
    run_id, frames = frames_of(rank)
    (rank / LOG).unlink()
    (rank / HEADS).unlink(missing_ok=True)
    log = LogWriter(Folder.at(str(rank)), int(rank.name.removeprefix("rank")), run_id, durable=False)
    log.commit(new for frame in frames for new in change(frame))
    log.close()
    return rank


def without(*kinds):
    """Leave out frames of some kinds."""
    return lambda frame: [] if frame.kind in kinds else [frame]

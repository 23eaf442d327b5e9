"""Logs of ranks taken apart and written anew, for tests of what only some writers leave."""

from __future__ import annotations

from introspect_cli.store.documents import dump
from introspect_cli.store.files import HEADS, LOG, Folder
from introspect_cli.store.frames import DOCUMENT, Frame, LogWriter
from introspect_cli.store.log import Frames
from introspect_cli.store.run import open_run


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


def recorded(rank):
    """The frames of a rank's log but its documents, which differ from run to run."""
    return [frame for frame in frames_of(rank)[1] if frame.kind != DOCUMENT]


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


def documents_of(run):
    """The documents of a run by name, `manifest` among them."""
    with open_run(run) as opened:
        return {"manifest": opened.manifest, **opened.settings}


def change_document(run, name, change):
    """Write other values into a document of a run that has ended."""
    data = f"{name}\n".encode() + dump({**documents_of(run)[name], **change})
    rewrite(run / "rank0", lambda frame: [frame._replace(body=[data] if _is(frame, name) else frame.body)])


def _is(frame, name):
    return frame.kind == DOCUMENT and frame.body[0].startswith(f"{name}\n".encode())

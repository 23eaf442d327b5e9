"""Checkpoints as runs: files and directories of tensors that are read where a run is.

Every verb opens what it is given here. A run is opened as it is; a checkpoint is read once, tensor by tensor, into a
run of one step in a temporary directory that goes when it is closed: the same checksums, statistics and sketches as a
capture of the same values has, so that nothing that reads runs need know of checkpoints. What reads them is imported
for them alone: most paths are runs.
"""

from __future__ import annotations

import math
import weakref
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.inspect.runs import chosen
from introspect_cli.records import SiteInfo
from introspect_cli.store.files import MANIFEST
from introspect_cli.store.pack import is_pack
from introspect_cli.store.remote import is_remote
from introspect_cli.store.run import Run, open_run
from introspect_cli.store.tensorfile import widened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from introspect_cli.records import Site, Summary
    from introspect_cli.tensors.arrays import Pieces


_LARGEST_RELOADED = 1 << 24
CHECKPOINT = "checkpoint"
"""The manifest's word for a run that was made of a checkpoint."""


def is_checkpoint(path: str | Path) -> bool:
    """Whether a local path holds tensors and is no run (no manifest, no pack); False where it cannot be looked at."""
    if is_remote(path) or str(path).endswith(".introspect.zip"):
        return False
    try:
        if (Path(path) / MANIFEST).exists():
            return False
        from introspect_cli.exchange.tensor_files import is_tensors

        return is_tensors(path) and not (Path(path).suffix == ".zip" and is_pack(path))
    except (OSError, ValueError):
        return False


def open_any(path: str | Path) -> Run:
    """Open a run, or a checkpoint as one: by its path, or `@1` for the last run, or a label.

    Raises:
        StoreError: there is neither, or it cannot be read.
        UsageError: it stands for no run, or for several.
    """
    path = chosen(path)
    if is_checkpoint(path):
        return _open_checkpoint(Path(path))
    return open_run(path)


@contextmanager
def opened(*paths: str | Path) -> Iterator[list[Run]]:
    """Open runs or checkpoints as `open_any` does, and close all at the end, also where one fails to open."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_any(path)) for path in paths]


def _open_checkpoint(path: Path) -> Run:
    """Open a checkpoint as a temporary run of one step; tensors can be read again from the file while it lies there.

    Raises:
        StoreError: it cannot be read, or holds no tensor.
    """
    from introspect_cli.exchange.checkpoint_state import in_usual_order, state_of
    from introspect_cli.exchange.tensor_files import read_any
    from introspect_cli.tensors.arrays import Pieces

    tree = read_any(path)
    try:
        # those of safetensors files are in order of name, not the model's
        state = state_of(tree, order_counts=not any(path.glob("*.safetensors")) and path.suffix != ".safetensors")
    except StoreError as error:
        raise StoreError(f"{path} is not a checkpoint: {error}") from None
    summaries = {site: summarised(held) for site, held in in_usual_order(state.rows)}
    run = written(summaries, path, state.settings, {CHECKPOINT: {"from": path.name}, "not_observed": state.notes})
    held = {summaries[site].checksum: held for site, held in state.rows.items() if isinstance(held, Pieces)}
    run.load_tensor = partial(_reloaded, held)
    return run


def _reloaded(held: Mapping[int, Pieces], checksum: int) -> NDArray[Any] | None:
    """One of the tensors by checksum, widened, read again from the file.

    None for an unknown checksum, for what cannot be read, and for over `_LARGEST_RELOADED` elements.
    """
    tensor = held.get(checksum)
    if tensor is None or tensor.unread or math.prod(tensor.shape) > _LARGEST_RELOADED:
        return None
    pieces = [widened(np.asarray(bits), tensor.dtype) for bits in tensor.read()]
    whole: NDArray[Any] = np.concatenate([*pieces, np.zeros(0, pieces[0].dtype if pieces else np.float32)])
    return whole.reshape(tensor.shape)


def summarised(held: Any) -> Summary:
    """The summary of a tensor (`Pieces`, read now) or of a plain value."""
    from introspect_cli.exchange.incoming import plain_summary
    from introspect_cli.tensors.arrays import Pieces, summary_of

    return summary_of(held, widened) if isinstance(held, Pieces) else plain_summary(held)


def written(
    summaries: Mapping[Site, Summary], path: str | Path, settings: Mapping[str, Any], about: Mapping[str, Any]
) -> Run:
    """Write summaries as a run of one step in a temporary directory, which goes when it is closed, and open it.

    Args:
        summaries: by site, in order.
        path: the path that the run is shown with.
        settings: settings documents by name.
        about: what its manifest says beside.

    Raises:
        StoreError: it cannot be written.
    """
    import shutil
    import tempfile

    from introspect_cli.exchange.incoming import Incoming, write_run

    place = Path(tempfile.mkdtemp(prefix="introspect-"))
    try:
        rows = tuple((site, SiteInfo(), summary) for site, summary in summaries.items())
        write_run(place / "run", [Incoming(0, 0, rows)], source=str(path), settings=settings, about=about, sketch=True)
        run = open_run(place / "run")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    run.path = path
    run.on_close(weakref.finalize(run, shutil.rmtree, place, ignore_errors=True))  # or when python ends
    return run

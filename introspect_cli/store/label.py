"""What a person says of a run: a line of text in a file of its own, so that nothing recorded is touched."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.store.files import LABEL, reason
from introspect_cli.store.reader import open_store

if TYPE_CHECKING:
    from pathlib import Path


def write_label(path: Path, text: str) -> None:
    """Write what a person says of the run at `path`; no text removes it.

    Raises:
        StoreError: there is no run, or it cannot be written.
    """
    folder = open_store(path)
    try:
        if text:
            folder.replace(LABEL, [text.encode()], 0o644)
        else:
            with suppress(FileNotFoundError):
                os.unlink(LABEL, dir_fd=folder.fd)
    except OSError as error:
        raise StoreError(f"cannot label {path}: {reason(error)}") from None
    finally:
        folder.close()

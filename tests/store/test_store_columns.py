"""The columns of a run's records, as the store describes them."""

from __future__ import annotations

import pytest
from logs import rewrite
from synthetic import row, write_run

from introspect_cli.errors import StoreError
from introspect_cli.store.frames import COLUMNS
from introspect_cli.store.run import open_run


def test_columns_of_another_version_are_refused(tmp_path):
    path = write_run(tmp_path / "run", [[row("forward", "output", "A", 1.5)]])

    def recoloured(frame):
        other = bytes(frame.body[0]).replace(b"checksum", b"checkhue")
        return [frame._replace(body=[other]) if frame.kind == COLUMNS else frame]

    rewrite(path / "rank0", recoloured)
    with pytest.raises(StoreError, match="its columns are not those that this version writes: install the newest"):
        open_run(path)

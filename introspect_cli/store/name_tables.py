"""The sites, layouts and modules of the ranks of a run, read once where ranks have the same bytes.

Thousands of ranks have a model each, most often the same one.
"""

from __future__ import annotations

import zlib
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from introspect_cli.store.arrow_decoder import Decoder
from introspect_cli.store.closed import rank_folder
from introspect_cli.store.files import DamageError, Folder, unreadable
from introspect_cli.store.names import decode_names, no_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.store.arrow import Schema
    from introspect_cli.store.columns import ColumnData
    from introspect_cli.store.index import Index

Names = TypeVar("Names")


class NameTables:
    """Sites, layouts and modules, by what tells the bytes that they were read from; and what decodes them."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, Schema], tuple[dict[tuple[str, int, int, int], Any], Decoder]] = {}

    def read(
        self, run: Folder, rank: int, index: Index, stream: str, made: Callable[[dict[str, ColumnData], str], Names]
    ) -> Names:
        """What is made of the content of a rank's `sites`, `layouts` or `modules` that its index vouches for."""
        last, schema, path = index.last, getattr(index.columns, stream), f"{run.path}/rank{rank}/{stream}.arrow"
        if last is None:
            return made(no_rows(schema), path)
        length, crc, count = int(last[f"{stream}_length"]), int(last[f"{stream}_crc"]), int(last[f"n_{stream}"])
        if (stream, schema) not in self._tables:
            self._tables[stream, schema] = {}, Decoder(schema)
        kept, decoder = self._tables[stream, schema]
        try:
            with rank_folder(run, rank) as folder:
                key = folder.content(f"{stream}.arrow"), length, crc, count
                if not key[0] or key not in kept:
                    data = _read_names(folder, f"{stream}.arrow", length)
                    if zlib.crc32(data) != crc:
                        raise DamageError(path, "its bytes are not those that were indexed")
                    key = key[0] or blake2b(data).hexdigest(), *key[1:]
        except FileNotFoundError:
            raise DamageError(path, "it is missing") from None
        if key not in kept:
            kept[key] = made(decode_names(data, decoder, count, path), path)
        return kept[key]  # type: ignore[no-any-return]  # what this very stream was made into


def _read_names(folder: Folder, name: str, length: int) -> bytes:
    """The bytes of a stream of names that its index vouches for."""
    try:
        with folder.file(name) as handle:
            data = handle.read(0, length)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(f"{folder.path}/{name}", error) from None
    if len(data) < length:
        raise DamageError(f"{folder.path}/{name}", "it ends before the names that the index counts")
    return data

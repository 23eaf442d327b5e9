"""The sites of a rank as a table, of which each column is decoded when it is first asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from introspect_cli.records import SETTING_KINDS, Kind, Phase, Site, SiteInfo
from introspect_cli.store.files import DamageError
from introspect_cli.store.names import plain_values
from introspect_cli.texts import shallow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from introspect_cli.store.columns import ColumnData, Texts

_SETTING = frozenset(kind.value for kind in SETTING_KINDS)
_SHORT = 64  # characters of a path that cannot be too deep


def _texts(name: str) -> cached_property[list[str]]:
    """A column of a table of sites that is decoded when it is first asked for."""
    return cached_property(lambda table: plain_values(table.columns[name]))


class SiteTable:
    """All sites of a rank, by number.

    Attributes:
        columns: as they are stored.
        key: uint64 (n,), `Site.key()` of each, as stored; `verify` recomputes it.
        call: uint32 (n,).
        path_of_file: where the table is stored, for messages.
        phase, kind, fqn: texts of each, made when they are asked for.
        module_class: of the module, optimizer or loader.
        op, source: "" where there is none.
    """

    phase, kind, fqn = _texts("phase"), _texts("kind"), _texts("fqn")
    module_class, op, source = _texts("module_class"), _texts("op"), _texts("source")

    def __init__(self, columns: dict[str, ColumnData], path: str) -> None:
        self.columns = columns
        self.path_of_file = path
        self.key = cast("NDArray[np.uint64]", columns["key"])
        self.call = cast("NDArray[np.uint32]", columns["call"])

    @cached_property
    def path(self) -> list[str]:
        """Path of each site inside nested values."""
        return [shallow(path) if len(path) > _SHORT else path for path in plain_values(self.columns["path"])]

    @cached_property
    def setting(self) -> NDArray[np.bool_]:
        """Whether digests leave a site out, bool (n,); True for sites that digests leave out."""
        return np.array([kind in _SETTING for kind in self.kind], np.bool_)

    def __len__(self) -> int:
        return len(self.key)

    def __getitem__(self, number: int) -> tuple[Site, SiteInfo]:
        """The site and what is known of it.

        Raises:
            IndexError: there is no such number.
            StoreError: its phase or kind is not one.
        """
        try:
            phase, kind = Phase(self.phase[number]), Kind(self.kind[number])
        except ValueError:
            raise DamageError(self.path_of_file, f"site {number} has a phase or a kind that is not one") from None
        site = Site(phase, kind, self.fqn[number], int(self.call[number]), self.path[number])
        return site, SiteInfo(self.module_class[number], self.op[number], self.source[number])

    def key_of(self, number: int) -> int:
        """The key of a site, computed from its texts as they are stored."""
        fqn, path = (cast("Texts", self.columns[name])[number] for name in ("fqn", "path"))
        site, _ = self[number]
        return replace(site, fqn=fqn, path=path).key()

    def __iter__(self) -> Iterator[tuple[Site, SiteInfo]]:
        return (self[number] for number in range(len(self)))

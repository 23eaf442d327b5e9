"""The sites of one rank as a table: columns for whole comparisons, rows as the words of `records`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np

from introspect_cli.records import SETTING_KINDS, Kind, Phase, Site, SiteInfo
from introspect_cli.store.columns import ColumnData, Texts
from introspect_cli.store.files import DamageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_SETTING = frozenset(kind.value for kind in SETTING_KINDS)


class SiteTable:
    """All sites of a rank, by number.

    Attributes:
        key: uint64 (n,), `Site.key()` of each, as stored; `verify` recomputes it.
        call: uint32 (n,).
        path_of_file: where the table is stored, for messages.
    """

    def __init__(self, columns: dict[str, ColumnData], path: str) -> None:
        self._columns = columns
        self.path_of_file = path
        self.key = cast("NDArray[np.uint64]", columns["key"])
        self.call = cast("NDArray[np.uint32]", columns["call"])

    def _texts(self, name: str) -> list[str]:
        column = self._columns[name]
        assert isinstance(column, Texts)
        return column.tolist()

    @cached_property
    def phase(self) -> list[str]:
        """Phase of each site."""
        return self._texts("phase")

    @cached_property
    def kind(self) -> list[str]:
        """Kind of each site."""
        return self._texts("kind")

    @cached_property
    def fqn(self) -> list[str]:
        """FQN of each site, as the script had it."""
        return self._texts("fqn")

    @cached_property
    def path(self) -> list[str]:
        """Path of each site inside nested values."""
        return self._texts("path")

    @cached_property
    def module_class(self) -> list[str]:
        """Class of the module, optimizer or loader of each site."""
        return self._texts("module_class")

    @cached_property
    def op(self) -> list[str]:
        """Operator of each site, "" where it is none."""
        return self._texts("op")

    @cached_property
    def source(self) -> list[str]:
        """`file:line` of each site, "" where unknown."""
        return self._texts("source")

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

    def __iter__(self) -> Iterator[tuple[Site, SiteInfo]]:
        return (self[number] for number in range(len(self)))

"""CRC-32 of what is read from disk.

No byte of a store is believed before its CRC is taken, so comparing two runs of many ranks takes the CRC of all they
wrote. The compiled kernels are many times as quick as zlib, but loading them takes as long as zlib does for some MB,
and most commands read less: so zlib begins.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

WORTHWHILE: Final = 1 << 24
"""Bytes from which on loading the kernels pays."""


class Crcs:
    """Takes CRCs, with the kernels once there was much to take them of."""

    def __init__(self) -> None:
        """Start with zlib."""
        self._bytes = 0
        self._kernels: ModuleType | None = None

    def of(self, data: bytes | memoryview) -> int:
        """The CRC-32 of bytes, as zlib has it; several threads may ask at once."""
        before = self._bytes
        self._bytes = before + len(data)
        if before < WORTHWHILE <= self._bytes:
            from introspect_cli.tensors.kernels import KERNELS

            self._kernels = KERNELS
        if self._kernels is None:
            return zlib.crc32(data)
        own = np.frombuffer(data, np.uint8)
        return int(self._kernels.crc32_at(own.ctypes.data, len(own)))


crc32 = Crcs().of
"""The CRC-32 of bytes; see `Crcs.of`."""

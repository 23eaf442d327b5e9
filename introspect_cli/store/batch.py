"""The records of one step as columns: what the writer takes and the reader gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class StepBatch:
    """Columns of n records; one row is one record.

    Attributes:
        site: uint32 (n,), ids of sites.
        sequence: uint32 (n,), the order in which things were recorded.
        layout: uint32 (n,), ids of layouts.
        status: uint8 (n,), values of `records.Status`.
        checksum: uint64 (n,), 0 where not observed.
        counts: int64 (n,) by name of `COUNT_STATS`; -1 where absent. Empty where no statistics are kept.
        floats: float64 (n,) by name of `FLOAT_STATS` and `SORTED_STATS` (skew and kurt float32); NaN where absent.
        sketch: float32 (n, 16), or None where no sketches are kept.
        text: n texts, "" where there is none. Raw: whoever shows one makes it harmless first.
    """

    site: NDArray[np.uint32]
    sequence: NDArray[np.uint32]
    layout: NDArray[np.uint32]
    status: NDArray[np.uint8]
    checksum: NDArray[np.uint64]
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    floats: dict[str, NDArray[Any]] = field(default_factory=dict)
    sketch: NDArray[np.float32] | None = None
    text: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.site)

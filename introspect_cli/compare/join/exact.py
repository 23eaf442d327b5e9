"""Exact distances, where both runs kept the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


def _wide(values: Any) -> npt.NDArray[Any] | None:
    """A tensor as float64 or complex128; None for what is not a number."""
    array = np.asarray(values)
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    return array.astype(np.complex128) if array.dtype.kind == "c" else None


@dataclass(frozen=True)
class Tensors:
    """Where both runs keep whole tensors, if they do.

    Attributes:
        a: run a.
        b: run b.
    """

    a: Any
    b: Any

    def relative(self, checksum_a: int, checksum_b: int, shape: tuple[int, ...]) -> float | None:
        """||a - b|| over the larger norm, from the stored tensors; None where one is not stored, or not as numbers.

        Elements that are not finite on either side are left out.

        Args:
            checksum_a: checksum of run a's tensor.
            checksum_b: checksum of run b's.
            shape: the shape that both must have.
        """
        stored = [self._load(self.a, checksum_a), self._load(self.b, checksum_b)]
        if stored[0] is None or stored[1] is None or not stored[0].shape == stored[1].shape == shape:
            return None
        a, b = stored[0].ravel(), stored[1].ravel()
        finite = np.isfinite(a) & np.isfinite(b)
        a, b = a[finite], b[finite]
        scale = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
        apart = float(np.linalg.norm(a - b))
        return 0.0 if scale == 0 else apart / scale

    def _load(self, run: Any, checksum: int) -> npt.NDArray[Any] | None:
        values = run.tensor(checksum) if checksum else None
        return None if values is None else _wide(values)

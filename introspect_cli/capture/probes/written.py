"""Which tensors were written to since their values were last recorded.

The problem: parameters are recorded as the optimizer leaves them. A script that loads a checkpoint in the middle of a
run, copies weights from another model or clamps them by hand changes them after that, and an optimizer with a line
search changes them between the forward passes of one step; the next forward pass then looks as if its modules computed
something else. The way: autograd counts the in-place writes of every tensor, and its memory has an address; a tensor
with another count or address than when it was recorded is recorded again. Writes through `.data` are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.capture.weak import ById

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

Mark = tuple[int, int]


class Written:
    """Remembers how tensors stood when they were recorded."""

    def __init__(self) -> None:
        """Start with nothing recorded."""
        self._marks: ById[Mark] = ById()

    def recorded(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember tensors that have just been recorded."""
        for tensor in tensors:
            mark = _mark(tensor)
            if mark is not None and self._marks.get(tensor) != mark:
                self._marks.set(tensor, mark)

    def since(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the tensors that were recorded and have been written to since, or never were recorded."""
        return [tensor for tensor in tensors if self._marks.get(tensor) != _mark(tensor)]


def _mark(tensor: torch.Tensor) -> Mark | None:
    """Count of in-place writes and address; None for what has neither (inference tensors, some subclasses)."""
    try:
        return tensor._version, tensor.data_ptr()  # noqa: SLF001 - documented by use; there is no public counter
    except (RuntimeError, NotImplementedError):
        return None

"""A tensor's elements in logical order, whatever its memory looks like.

Kernels want runs of contiguous elements; scripts have transposes, slices, channels-last images and expanded scalars,
some of them larger than what may be copied at once. So tensors are cut along the leading dimensions into views of at
most `limit` elements, copied one at a time, each with the row-major index of its first element. Every torch operation
of introspect runs inside `unobserved`, so that no mode of the script sees it.

Reading a transposed matrix in logical order touches a cache line for each element. So the compiled kernels copy most
tensors themselves (`strided.cpp`); what is here is for the others, and for other devices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


STORAGE_BEGIN: Final[Callable[[torch.Tensor], int]] = torch._C._data_address  # type: ignore[attr-defined]  # noqa: SLF001  # no public one
EXPANDED: Final = 1 << 26
"""Elements up to which a tensor is read as its shape says, however little memory it has: it takes 50 ms."""
REPEATS: Final = 16
"""Beyond, how many times on average an element may be read again."""


def _guards_of_torch(*names: str) -> tuple[Callable[[], Any], ...]:
    """Those of the named guard classes of `torch._C` that this version of torch has."""
    return tuple(guard for guard in (getattr(torch._C, name, None) for name in names) if guard is not None)  # noqa: SLF001


_MODES_OFF: Final = _guards_of_torch("DisableTorchFunction", "_DisableTorchDispatch")
_AUTOCAST_OFF: Final = _guards_of_torch("_DisableAutocast")
_autocasts: Final[Callable[[], bool]] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # noqa: SLF001


def address_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's first element, its storage offset included.

    `data_ptr()` hands out memory to write to, and so gives a lazy copy memory of its own; this leaves it lazy.

    Raises:
        RuntimeError: the tensor has no storage.
    """
    return STORAGE_BEGIN(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def memory_of(tensor: torch.Tensor) -> int:
    """Address where a tensor's storage begins, the same for all its views; 0 where it has none, or refuses to say."""
    try:
        return STORAGE_BEGIN(tensor)
    except Exception:  # sparse, wrapped and opaque tensors raise errors of several classes
        return 0


class unobserved:  # noqa: N801 - stands in a `with` like the guards that it is made of
    """Run torch operations past the script's torch-function modes, dispatch modes and autocast."""

    __slots__ = ("_entered",)

    _entered: list[Any]

    def __enter__(self) -> None:
        """Switch the modes off in this thread, autocast only if it is on; use each instance for one `with` only."""
        entered = self._entered = []  # nothing is off before; each instance is for one `with`
        try:
            for new in (*_MODES_OFF, *_AUTOCAST_OFF) if _autocasts() else _MODES_OFF:
                guard = new()
                guard.__enter__()
                entered.append(guard)
        except BaseException:  # an interrupt
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        """Switch the modes on again that `__enter__` switched off; nothing at a second call."""
        entered = self._entered
        while entered:
            entered.pop().__exit__(*raised)


def pieces(tensor: torch.Tensor, limit: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Contents of a strided tensor as contiguous one-dimensional pieces, row-major, lazy conjugation and negation done.

    A contiguous tensor is one piece, not copied, whatever its size.

    Args:
        tensor: any strided tensor.
        limit: elements that a piece has at most if it has to be copied.

    Yields:
        The row-major index of the piece's first element, and the piece, shape (n,).
    """
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        yield 0, tensor.detach().view(-1)
        return
    for offset, view in cut(tensor, limit):
        yield offset, view.resolve_conj().resolve_neg().contiguous().view(-1)


def cut(tensor: torch.Tensor, limit: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a strided tensor along its leading dimensions into views of at most `limit` elements; none if it is empty.

    Yields:
        The row-major index of the view's first element, and the view, not copied.
    """
    yield from _cut(tensor.detach(), limit, 0)


def _cut(tensor: torch.Tensor, limit: int, offset: int) -> Iterator[tuple[int, torch.Tensor]]:
    """`cut` of a detached tensor whose first element has index `offset`."""
    numel = tensor.numel()
    if numel == 0:
        return
    if numel <= limit:
        yield offset, tensor
        return
    per_row = numel // tensor.shape[0]
    if per_row > limit:
        for index in range(tensor.shape[0]):
            yield from _cut(tensor[index], limit, offset + index * per_row)
        return
    rows = limit // per_row
    for start in range(0, tensor.shape[0], rows):
        yield offset + start * per_row, tensor[start : start + rows]


def in_memory(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Sizes and strides of what a vastly expanded tensor has in memory; None for any other tensor.

    A tensor is vastly expanded if it has more than 2**26 elements, and more than 16 times as many as it has memory for.
    `zeros(1).expand(2**40)` and windows that overlap cost nothing to make and would take hours to read element by
    element. Dimensions of stride 0 are taken once; where windows still overlap, all memory from the first element to
    the last is taken, as one dimension.

    Args:
        shape: sizes of the tensor.
        strides: its strides, in elements.
    """
    numel = math.prod(shape)
    if numel <= EXPANDED:
        return None
    sizes = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    kept = math.prod(sizes)
    if numel <= REPEATS * min(kept, reach):
        return None
    return ([reach], [1]) if reach < kept else (sizes, list(strides))


def strides_kind(tensor: torch.Tensor) -> str:
    """One word for how a tensor lies in memory: `contiguous`, `channels_last`, `expanded`, `strided`, ...

    Tensors that are not strided are named by their layout: `sparse_coo`, `sparse_csr`, `jagged`, ...
    """
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "channels_last_3d"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "expanded"
    return "strided"

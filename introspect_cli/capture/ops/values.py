"""The tensors that go into an operator and come out, and which operator wrote each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.capture.ops.schema import OpFacts

FLOATS = frozenset({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}) - {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def outputs(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor of each result, then of each argument that the operator writes to and does not return.

    A result's path is where it sits in `result` (""; `[0]`), an argument's its name (`['out']`).
    """
    yield from tensors("", result)
    for position, name in facts.written:
        value = args[position] if 0 <= position < len(args) else (kwargs or {}).get(name)
        yield from tensors(f"[{name!r}]", value)


def tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor of each tensor in a value, those in nested lists and tuples too; dicts are not looked into.

    `path` is the value's own: an item has `[0]` after it.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            if item is not None and not isinstance(item, (int, float)):
                yield from tensors(f"{path}[{position}]", item)


def arguments_of_element(args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """Arguments that one element of a `_foreach_` operator's result is computed from.

    Args:
        args: the operator's arguments; of each list or tuple the item at the element's place is taken, None if it is
            shorter.
        path: the path of the element's result, which ends with its place: `[3]`; without a number it is place 0.
    """
    digits = path.rpartition("[")[2].rstrip("]")
    place = int(digits) if digits.isdigit() else 0
    return tuple(
        (value[place] if place < len(value) else None) if isinstance(value, (list, tuple)) else value for value in args
    )


def is_parameter(value: Any) -> bool:
    """Whether a value is a parameter; `isinstance` alone would run torch's python for every tensor that is none."""
    return type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter)

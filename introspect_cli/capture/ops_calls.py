"""One call of an operator, and the tensors that go into it and come out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.capture.ops_schema import OpFacts
    from introspect_cli.records import Phase

FLOATS = frozenset({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}) - {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


class OpCall:
    """One call of an operator in a module: the same in every step, so its sites are made once."""

    __slots__ = ("facts", "fqn", "module_class", "number", "phase", "sites", "source")

    def __init__(
        self, phase: Phase, fqn: str, module_class: str, facts: OpFacts, number: int = 0, source: str = ""
    ) -> None:
        """Say which call it is; sites come with results."""
        self.number = number
        self.phase = phase
        self.fqn = fqn
        self.module_class = module_class
        self.facts = facts
        self.source = source
        self.sites: dict[str, int] = {}


class Scope:
    """One module in one phase: how often each operator has run there in this step."""

    __slots__ = ("counts", "fqn", "known", "module_class", "phase", "step", "watched")

    def __init__(self, phase: Phase, fqn: str, module_class: str, *, watched: bool) -> None:
        """Start without calls."""
        self.phase = phase
        self.fqn = fqn
        self.module_class = module_class
        self.watched = watched
        self.step = -1
        self.counts: dict[OpFacts, int] = {}
        self.known: dict[tuple[OpFacts, int], OpCall] = {}


def outputs(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that an operator returned or wrote to, with its path."""
    if isinstance(result, torch.Tensor):
        yield "", result
    elif result is not None:
        yield from tensors("", result)
    for position, name in facts.written:
        value = args[position] if 0 <= position < len(args) else (kwargs or {}).get(name)
        yield from tensors(f"[{name!r}]", value)


def tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in nested lists and tuples (operators take and give nothing else)."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            if item is not None and not isinstance(item, (int, float)):
                yield from tensors(f"{path}[{position}]", item)


def row_of(args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """What of the arguments one result of an operator over lists came from: its own place in each list."""
    digits = path.rpartition("[")[2].rstrip("]")
    place = int(digits) if digits.isdigit() else 0
    return tuple(
        (value[place] if place < len(value) else None) if isinstance(value, (list, tuple)) else value for value in args
    )


def memory_of(value: torch.Tensor) -> int:
    """The address of a tensor's storage: views of one tensor share it; 0 where there is none."""
    try:
        return value.untyped_storage().data_ptr()
    except Exception:  # sparse, wrapped and opaque tensors raise errors of several classes
        return 0

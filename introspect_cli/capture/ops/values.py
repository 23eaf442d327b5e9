"""The tensors that go into an operator and come out, and which operator wrote each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.records import Kind, Phase
from introspect_cli.tensors.views import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.ops.schema import OpFacts

FLOATS = frozenset({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}) - {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip

_MOST = 64
"""Inputs that are named of one operator, at most."""

_PLAIN = torch.Tensor
_NUMBERS = (int, float, bool, str)


def outputs(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor for each result, and for each argument written to and not returned."""
    yield from tensors("", result)
    for position, name in facts.written:
        value = args[position] if 0 <= position < len(args) else (kwargs or {}).get(name)
        yield from tensors(f"[{name!r}]", value)


def tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor for each tensor in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            if item is not None and not isinstance(item, (int, float)):
                yield from tensors(f"{path}[{position}]", item)


def arguments_of_element(args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    """Arguments of one element of a `_foreach_` operator: from each list the item at the place in `path`."""
    digits = path.rpartition("[")[2].rstrip("]")
    place = int(digits) if digits.isdigit() else 0
    return tuple(
        (value[place] if place < len(value) else None) if isinstance(value, (list, tuple)) else value for value in args
    )


def is_parameter(value: Any) -> bool:
    """Whether a value is a parameter; `isinstance` alone runs python of torch's for every tensor that is none."""
    return type(value) is not _PLAIN and isinstance(value, torch.nn.Parameter)


class Writers:
    """Last site that wrote each piece of memory in this step, by address."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.names = context.names.parameters
        self.sites: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all sites, as a step ends."""
        self.sites.clear()

    def set_writer(self, site: int, value: torch.Tensor) -> None:
        """Set the site that wrote a tensor's memory."""
        memory = memory_of(value)
        if memory:
            self.sites[memory] = site

    def forget(self, value: torch.Tensor) -> None:
        """Forget the site of a tensor's memory: an unrecorded result was written to it."""
        self.sites.pop(memory_of(value), None)

    def writer_of(self, value: torch.Tensor) -> int:
        """Last site that wrote a tensor's memory; a parameter's own where none did; else -1."""
        memory = memory_of(value)
        site = self.sites.get(memory, -1)
        if site < 0 and is_parameter(value):
            name = self.names.name_of(value)
            if name is not None:
                site = self.sites[memory] = self._context.site(name, Phase.START, Kind.PARAM)
        return site

    def writers_of(self, values: tuple[Any, ...] | list[Any]) -> list[int]:
        """Sites that wrote the floating point inputs, each once, in order, 64 at most; -1 for an unknown one."""
        found: list[int] = []
        self._collect(values, found)
        return found

    def _collect(self, values: tuple[Any, ...] | list[Any], found: list[int]) -> None:
        """Append the sites of values, also in nested lists."""
        for value in values:
            if value is None or isinstance(value, _NUMBERS):
                continue
            if isinstance(value, _PLAIN):
                if value.dtype in FLOATS:
                    site = self.writer_of(value)
                    if site not in found:
                        found.append(site)
                        if len(found) >= _MOST:
                            return
            elif isinstance(value, (tuple, list)):
                self._collect(value, found)

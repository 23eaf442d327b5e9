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
    """Path and tensor of each result, then of each argument that the operator writes to and does not return.

    A result's path is where it sits in `result` (""; `[0]`), an argument's its name (`['out']`).
    """
    yield from tensors("", result)
    for position, name in facts.written:
        value = args[position] if 0 <= position < len(args) else (kwargs or {}).get(name)
        yield from tensors(f"[{name!r}]", value)


def tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor of each tensor in a value, those in nested lists and tuples too; `path` is the value's own."""
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
        path: the path of the element's result, which ends with its place: `[3]`.
    """
    digits = path.rpartition("[")[2].rstrip("]")
    place = int(digits) if digits.isdigit() else 0
    return tuple(
        (value[place] if place < len(value) else None) if isinstance(value, (list, tuple)) else value for value in args
    )


def is_parameter(value: Any) -> bool:
    """Whether a value is a parameter; `isinstance` alone would run torch's python for every tensor that is none."""
    return type(value) is not _PLAIN and isinstance(value, torch.nn.Parameter)


class Writers:
    """Last site that wrote each piece of memory in this step, by address."""

    def __init__(self, context: Context) -> None:
        """Start without sites; `context` has the names of parameters."""
        self._context = context
        self.names = context.names.parameters
        self.sites: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all sites, as a step ends: memory may be used for something else then."""
        self.sites.clear()

    def set_writer(self, site: int, value: torch.Tensor) -> None:
        """Note `site` as the last that wrote a tensor's memory; nothing for a tensor without memory."""
        memory = memory_of(value)
        if memory:
            self.sites[memory] = site

    def forget(self, value: torch.Tensor) -> None:
        """Forget which site wrote a tensor's memory, since a result that is not recorded was written to it."""
        self.sites.pop(memory_of(value), None)

    def writer_of(self, value: torch.Tensor) -> int:
        """Number of the last site that wrote a tensor's memory; a parameter that none has written is its own site.

        -1 for any other tensor.
        """
        memory = memory_of(value)
        site = self.sites.get(memory, -1)
        if site < 0 and is_parameter(value):
            name = self.names.name_of(value)
            if name is not None:
                site = self.sites[memory] = self._context.site(name, Phase.START, Kind.PARAM)
        return site

    def writers_of(self, values: tuple[Any, ...] | list[Any]) -> list[int]:
        """Sites that wrote the floating point inputs, each once, in order, the first 64; -1 is for unknown ones."""
        found: list[int] = []
        self._collect(values, found)
        return found

    def _collect(self, values: tuple[Any, ...] | list[Any], found: list[int]) -> None:
        """Append the sites that wrote the floating point tensors among values, in nested lists too, to `found`."""
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

"""What operators are given beside tensors: the document `settings/operators`, with `--level op`.

A module's options are attributes of it; what is called as a function has none, and `gelu(x, approximate="tanh")` gives
other numbers from equal inputs. So the plain arguments of each operator are noted when its site is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from introspect_cli.records import Site

_PLAIN = frozenset({bool, int, float, str})
_NAMED = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})
_MOST = 10_000
_MOST_ITEMS = 8


class OperatorArguments:
    """The document in the making.

    Attributes:
        found: by the operator's place, its arguments by name.
        changed: whether that is another than when it was last written.
    """

    def __init__(self) -> None:
        """No operator has run."""
        self.found: dict[str, dict[str, Any]] = {}
        self.changed = False

    def note(self, func: Any, site: Site, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Note an operator's plain arguments, where it runs for the first time in this place.

        Args:
            func: the operator.
            site: of its result.
            name: the operator's.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        key = f"{site.phase.value} {site.fqn} {site.call} {name}"
        if len(self.found) >= _MOST or key in self.found:
            return
        schema = getattr(func, "_schema", None)
        arguments = () if schema is None else schema.arguments
        # what is left at its default is not handed on
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= zip((argument.name for argument in arguments), args, strict=False)
        plain = {name: _plain(value) for name, value in (given | (kwargs or {})).items()}
        told = {name: value for name, value in plain.items() if value is not None}
        if told:
            self.found[key] = told
            self.changed = True


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value if kind is not int or value.bit_length() < 64 else None
    if kind in _NAMED:
        return str(value)
    if kind in (list, tuple) and 0 < len(value) <= _MOST_ITEMS and all(type(item) in _PLAIN for item in value):
        return str(list(value))
    return None

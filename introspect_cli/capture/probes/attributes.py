"""What each module is apart from its tensors: plain attributes, train or eval mode, and the hooks on it.

An `eps`, a dropout probability, a forgotten `eval()` is what people look for first, and no tensor says it. So plain
attributes are written with the module tree, and again from the step on at which they changed. Only a module's own
`__dict__` is read and only exact builtin types are looked into: no property, no `repr` of the script's runs. A forward
pass in which nothing has changed costs a comparison of identities for each attribute.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import replace
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from introspect_cli.capture.environment import redact
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.description import FUNCTIONS, called
from introspect_cli.records import Phase
from introspect_cli.tensors.values import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.capture.context import Context
    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.rank_writer import RankWriter

_PLAIN = frozenset({bool, int, float, str, complex, type(None)})
_CHILDREN = (dict, OrderedDict)
"""Types of `_modules`; older versions of torch have the second."""

_NAMED = (torch.dtype, torch.device)
_ATTRIBUTES_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""

_HOOKS = {
    "_forward_pre_hooks": "forward pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "backward pre",
    "_backward_hooks": "backward",
}
_PACKAGE = "introspect_cli."

MAX_TEXT = 200
MAX_ITEMS = 8
MAX_BITS = 256  # bits of an integer
MAX_CHANGES = 8
CHANGES_OFTEN = "(changes often)"
"""Recorded for an attribute that has changed 8 times, such as a counter, which is not followed further."""


class AttributeSnapshot(NamedTuple):
    """Snapshot of a module's attributes, quicker to compare than to read again.

    Attributes:
        module: that it is of, referred to weakly.
        length: how many attributes it has.
        plain: those that are plain, by name.
        sizes: how many hooks and children it has.
    """

    module: weakref.ref[nn.Module]
    length: int
    plain: dict[str, object]
    sizes: dict[str, int]

    def holds(self) -> bool:
        """Whether the module is alive, has as many attributes, hooks and children, and the very same plain objects."""
        module = self.module()
        if module is None:
            return False
        held = vars(module)
        return (
            len(held) == self.length
            and all(map(is_, map(held.get, self.plain), self.plain.values()))
            and all(len(held.get(name, ())) == size for name, size in self.sizes.items())
        )


class AttributeProbe(GuardedProbe):
    """Records plain attributes, mode and hooks of modules when a root is called."""

    name = "attributes"
    lost = "attributes of modules are"

    def __init__(self, context: Context, rank: RankWriter, secret: tuple[str, ...]) -> None:
        """Record nothing before `install`.

        Args:
            context: shared by all probes.
            rank: the writer of rows of modules.
            secret: globs over names whose values are redacted.
        """
        self._watched: dict[str, list[AttributeSnapshot]] = {}
        super().__init__(context, then=self._watched.clear)
        self._rank = rank
        self._secret = secret
        self._recorded: dict[str, ModuleInfo] = {}
        self._changes: dict[tuple[str, str], int] = {}

    def remove(self) -> None:
        """Stop listening, and drop the snapshots."""
        super().remove()
        self._watched.clear()

    def on_root(self, root: nn.Module) -> None:
        """Write rows for modules named since the last look, and for a root's with other attributes, mode or hooks.

        Nothing in evaluation, or for a root without a name.
        """
        state = None if self._context.stack.phase is Phase.EVAL else self._context.names.find(root)
        if state is not None:
            seen = self._watched.get(state.fqn)
            if seen is None or not all(one.holds() for one in seen):
                self._write_changed(root, state.fqn)

    def on_made(self, module: nn.Module) -> None:
        """Write the row of a module that no other holds, when it gets its name; nothing in evaluation."""
        state = None if self._context.stack.phase is Phase.EVAL else self._context.names.find(module)
        if state is not None:
            self._write_changed(module, state.fqn)

    def _write_changed(self, root: nn.Module, root_name: str) -> None:
        """Write rows of all new modules, and of those in a root whose attributes changed; take the root's snapshots.

        No row for a module made again under the same name with the same attributes.

        Args:
            root: the outermost module.
            root_name: its FQN.
        """
        names, step = self._context.names, self._context.recorder.step
        held: list[AttributeSnapshot] = []
        new = {info.fqn: info for info in names.new_modules()}
        changed: list[ModuleInfo] = []
        for module in _below(root):
            held.append(self._snapshot(module))
            state = names.find(module)
            if state is None:
                continue
            pairs = tuple(self._pairs(state.fqn, module))
            last = new.get(state.fqn) or self._recorded.get(state.fqn) or names.describe(module, state)
            if last.attributes == pairs:
                continue
            before, updated = self._recorded.get(state.fqn), replace(last, attributes=pairs, step=step)
            if before is not None and replace(updated, step=before.step) == before:
                new.pop(state.fqn, None)  # made anew under the same name
                continue
            self._recorded[state.fqn] = updated
            if state.fqn in new:
                new[state.fqn] = updated
            else:
                changed.append(updated)
        self._watched[root_name] = held
        rows = [*new.values(), *changed]
        if rows:
            self._rank.modules(rows)

    def _snapshot(self, module: nn.Module) -> AttributeSnapshot:
        """A snapshot of the module's plain attributes; those that have changed 8 times are left out."""
        held = vars(module)
        state = self._context.names.find(module)
        fqn = "" if state is None else state.fqn
        # What is not plain may become so; its identity alone would keep no memory alive, so it is not held.
        plain = {
            name: value
            for name, value in _attributes_of(module)
            if _text(value) and (not self._changes or self._changes.get((fqn, name), 0) < MAX_CHANGES)
        }
        sized = [name for name in _HOOKS if type(held.get(name)).__name__ == "OrderedDict"]
        if type(held.get("_modules")) in _CHILDREN:
            sized.append("_modules")
        return AttributeSnapshot(weakref.ref(module), len(held), plain, {name: len(held[name]) for name in sized})

    def _pairs(self, fqn: str, module: nn.Module) -> Iterator[tuple[str, str]]:
        """Name and text, cut to 200 characters, of each plain attribute; then `hooks`, kinds and functions, if any.

        Secret values are redacted. Changes of each attribute are counted: from the 8th on, the text is
        `(changes often)`.
        """
        info = self._recorded.get(fqn)
        before = {} if info is None else dict(info.attributes)
        held = vars(module)
        for name, value in _attributes_of(module):
            text = _text(value)
            if not text:
                continue
            if value is not None and type(value) is not bool:
                text = redact.value(name, text, self._secret)[:MAX_TEXT]
            times = self._changes.get((fqn, name), 0) + (before.get(name, text) != text)
            if times:
                self._changes[fqn, name] = times
            yield name, text if times < MAX_CHANGES else CHANGES_OFTEN
        hooks = [
            f"{kind} {called(hook, in_full=True)}" for key, kind in _HOOKS.items() for hook in _hooks(held.get(key))
        ]
        if hooks:
            yield "hooks", ", ".join(hooks)[:MAX_TEXT]


def _below(root: nn.Module) -> Iterator[nn.Module]:
    """A module and all inside it, each once; nothing inside one whose `_modules` is no dict, such as a scripted one."""
    waiting, seen = [root], {id(root)}
    while waiting:
        module = waiting.pop()
        yield module
        children = vars(module).get("_modules")
        if children is None or type(children) not in _CHILDREN:
            continue
        for child in children.values():
            if isinstance(child, nn.Module) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _attributes_of(module: nn.Module) -> list[tuple[str, object]]:
    """Names and values in a module's `__dict__`, in its order: `training`, and what not every module has.

    For a module of torch's own classes, private names are left out, too.
    """
    attributes = [item for item in vars(module).items() if type(item[0]) is str and item[0] not in _ATTRIBUTES_OF_TORCH]
    if type(module).__module__.startswith("torch."):  # private names in its own classes
        return [item for item in attributes if not item[0].startswith("_")]
    return attributes


def _text(value: object) -> str:
    """Text of a plain value: number, str, None, dtype, device, function, or tuple of up to 8 numbers, texts and None.

    "" for any other, and for an integer of more than 256 bits.
    """
    value = plain(value)
    kind = type(value)
    if kind is int and int.bit_length(value) > MAX_BITS:  # type: ignore[arg-type] # its exact type is int
        return ""
    if kind in _PLAIN:
        return repr(value)
    if kind in _NAMED:
        return str(value)
    if kind in FUNCTIONS:
        return called(value, in_full=True)
    if kind is tuple and len(value) <= MAX_ITEMS:  # type: ignore[arg-type] # its exact type is tuple
        texts = [_text(item) if type(item) in _PLAIN else "" for item in value]  # type: ignore[attr-defined] # as above
        return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})" if all(texts) else ""
    return ""


def _hooks(registry: Any) -> list[Any]:
    """Hooks in a registry of a module, without introspect's; [] for what is no registry.

    Args:
        registry: such as `module._forward_hooks`; may be None.
    """
    if registry is None or not hasattr(registry, "values"):
        return []
    return [hook for hook in registry.values() if not called(hook, in_full=True).startswith(_PACKAGE)]

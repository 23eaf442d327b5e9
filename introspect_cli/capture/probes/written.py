"""How tensors stood when they were recorded, so that what is written to afterwards is seen.

It is asked twice a step of all parameters: of hundreds, Python makes lists of identities and numbers that take longer
than looking at the tensors. `held.cpp` asks it in one call, as long as nothing has changed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.probes.held import parameters_of
from introspect_cli.records import Kind
from introspect_cli.tensors.kernels import KERNELS, numbers_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from introspect_cli.capture.context import Context
    from introspect_cli.tensors.summarizer import Summarizer


class Identities:
    """Which objects were in a list, without a reference to them."""

    def __init__(self, objects: list[Any]) -> None:
        """Take down those of a list."""
        self._all = numbers_of(map(id, objects))

    def are(self, objects: list[Any]) -> bool:
        """Whether another list has the same, in the same order."""
        if KERNELS is not None and type(objects) is list:
            return bool(KERNELS.are_these(self._all, objects))
        return bool(self._all == list(map(id, objects)))


class Written:
    """Remembers how tensors stood when they were recorded, by their `id`."""

    def __init__(self, summarizer: Summarizer) -> None:
        """Start with nothing recorded; the summarizer looks at tensors."""
        self._summarizer = summarizer
        self._marks: dict[int, Hashable] = {}
        # Of those recorded last, who are asked for next as a rule: here, or where compiled code asks for all of them.
        self._last: tuple[list[int], list[Hashable]] = ([], [])
        self._stood: Any = None if KERNELS is None or summarizer.intake is None else KERNELS.stood()

    def recorded(self, tensors: list[torch.Tensor]) -> None:
        """Remember tensors that have just been recorded."""
        if not tensors or self._is_noted(tensors, anew=False):
            return
        identities = list(map(id, tensors))
        if identities != self._last[0]:
            self._put_with_the_others()
        noted = self._is_noted(tensors, anew=True)
        self._last = ([], []) if noted else (identities, self._summarizer.stands(tensors))

    def _is_noted(self, tensors: list[torch.Tensor], *, anew: bool) -> bool:
        return self._stood is not None and bool(self._stood.note(self._summarizer.intake, tensors, anew))

    def hold(self, standing: Any, names: tuple[str, ...], *, whole: bool) -> bool:
        """Whether what modules hold is what was recorded last, and was not written to since; False if not known.

        Args:
            standing: what knows the modules.
            names: where they hold it.
            whole: whether they have to hold all else that they held, too.
        """
        return self._stood is not None and bool(self._stood.holds(self._summarizer.intake, standing, names, whole))

    def since(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the tensors that were recorded and have been written to since, or never were recorded."""
        identities, now = list(map(id, tensors)), self._summarizer.stands(tensors)
        if self._last == (identities, now):
            return []
        self._put_with_the_others()
        before = list(map(self._marks.get, identities))
        return [tensor for tensor, one, other in zip(tensors, before, now, strict=True) if one != other]

    def _put_with_the_others(self) -> None:
        for last in (self._last, ([], []) if self._stood is None else self._stood.taken()):
            for identity, mark in zip(*last, strict=True):
                if mark is None:
                    self._marks.pop(identity, None)
                else:
                    self._marks[identity] = mark
        self._last = [], []


class Loose:
    """The parameters that an optimizer holds and no module, as far as they have been recorded."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._as_of = -1
        self._references: list[weakref.ref[torch.Tensor]] = []

    def tensors(self) -> list[torch.Tensor]:
        """Those that still are."""
        names = self._context.names.parameters
        if Kind.PARAM not in self._context.kinds or self._context.parts.active:
            return []
        if self._as_of != names.changes:
            held = [tensor for one in self._context.clock.trained.optimizers() for tensor in parameters_of(one)]
            alone = [tensor for tensor in held if (name := names.of(tensor)) is not None and name.makeshift]
            self._as_of, self._references = names.changes, list(map(weakref.ref, alone))
        return [tensor for reference in self._references if (tensor := reference()) is not None]

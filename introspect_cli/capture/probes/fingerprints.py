"""Fingerprints of recorded tensors, by which later writes are noticed."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from introspect_cli.capture.probes.optimizer_values import parameters_of
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from introspect_cli.capture.context import Context
    from introspect_cli.tensors.summarizer import Summarizer


class Fingerprints:
    """Fingerprints of tensors when they were recorded, by `id`."""

    def __init__(self, summarizer: Summarizer) -> None:
        """Start empty; the summarizer makes the fingerprints."""
        self._summarizer = summarizer
        self._by_identity: dict[int, Hashable] = {}
        # Of those recorded last, who are asked for next as a rule.
        self._last: tuple[list[int], list[Hashable]] = ([], [])

    def remember(self, tensors: list[torch.Tensor]) -> None:
        """Keep the fingerprints that tensors have now, as they have just been recorded."""
        if not tensors:
            return
        identities = list(map(id, tensors))
        if identities != self._last[0]:
            self._keep_last()
        self._last = identities, self._summarizer.marks(tensors)

    def rewritten(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the tensors whose fingerprint is not the one that `remember` kept, or that have none."""
        identities, now = list(map(id, tensors)), self._summarizer.marks(tensors)
        if self._last == (identities, now):
            return []
        self._keep_last()
        before = list(map(self._by_identity.get, identities))
        return [tensor for tensor, one, other in zip(tensors, before, now, strict=True) if one != other]

    def _keep_last(self) -> None:
        """Move the fingerprints that were taken last from their lists to the dictionary."""
        for identity, mark in zip(*self._last, strict=True):
            if mark is None:
                self._by_identity.pop(identity, None)
            else:
                self._by_identity[identity] = mark
        self._last = [], []


class UnheldParameters:
    """Parameters that an optimizer holds and no module."""

    def __init__(self, context: Context) -> None:
        """Look for nothing before `tensors`."""
        self._context = context
        self._as_of = -1
        self._references: list[weakref.ref[torch.Tensor]] = []

    def tensors(self) -> list[torch.Tensor]:
        """Live parameters that an optimizer holds and no known module; [] where parameters are not recorded.

        [] also where parameters lie in flat tensors. Cached until a name changes.
        """
        names = self._context.names.parameters
        if Kind.PARAM not in self._context.kinds or self._context.parts.is_active:
            return []
        if self._as_of != names.changes:
            held = [tensor for one in self._context.clock.trained.optimizers() for tensor in parameters_of(one)]
            alone = [tensor for tensor in held if (name := names.name_of(tensor)) is not None and name.makeshift]
            self._as_of, self._references = names.changes, list(map(weakref.ref, alone))
        return [tensor for reference in self._references if (tensor := reference()) is not None]

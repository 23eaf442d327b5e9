"""Batches, as data loaders yield them to the script."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from introspect_cli.capture import private_api
from introspect_cli.capture.names import FreeNames
from introspect_cli.capture.probes.base import Patches
from introspect_cli.records import Kind, Phase, Site, SiteInfo
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from introspect_cli.capture.context import Context


class DataProbe:
    """Watches iterators of `DataLoader`s."""

    name = "data"

    def __init__(self, context: Context) -> None:
        """Start without loaders."""
        self._context = context
        self._guarded = context.guard.around(self.name, "batches are")
        self._recorder = context.recorder
        self._loaders = FreeNames()
        self._iterators = FreeNames()
        self._loader_of: dict[str, str] = {}
        self._counts: dict[tuple[str, Phase], int] = {}
        self._patches = Patches()

    def install(self) -> None:
        """Replace the two methods through which every batch passes."""
        iterator = private_api.LOADER_ITERATOR
        if Kind.BATCH not in self._context.kinds:
            return
        if iterator is None:
            self._context.guard.note("batches are not observed: this torch has no known loader iterator")
            return
        probe, started, following = self, DataLoader.__iter__, iterator.__next__

        @functools.wraps(started)
        def __iter__(self: DataLoader[Any]) -> Any:  # noqa: N807 - stands in for DataLoader.__iter__
            result = started(self)
            if probe._guarded.on:
                with probe._guarded:
                    probe._begun(self, result)
            return result

        @functools.wraps(following)
        def __next__(self: Any) -> Any:  # noqa: N807 - stands in for the iterator's __next__
            if not probe._guarded.on:
                return following(self)
            with probe._guarded, unobserved():
                probe._context.begin()
            batch = following(self)
            if probe._guarded.on and probe._recorder.wanted:
                with probe._guarded, unobserved():
                    probe._record(self, batch)
            return batch

        self._patches.replace(DataLoader, "__iter__", __iter__)
        self._patches.replace(iterator, "__next__", __next__)
        self._context.on_tick.append(self._counts.clear)
        self._guarded.on = True

    def remove(self) -> None:
        """Put the methods back."""
        self._guarded.on = False
        self._patches.remove()

    def _begun(self, loader: DataLoader[Any], iterator: object) -> None:
        name = self._loaders.name(loader, type(loader).__name__)
        # Persistent workers hand out one iterator again and again; it keeps its name.
        self._loader_of[self._iterators.name(iterator, "iterator")] = name

    def _record(self, iterator: object, batch: object) -> None:
        phase = Phase.DATA if torch.is_grad_enabled() else Phase.EVAL
        if phase is Phase.EVAL and not self._context.wants_eval:
            return
        loader = self._loader_of.get(self._iterators.find(iterator) or "", "DataLoader")
        call = self._counts.get((loader, phase), 0)
        self._counts[loader, phase] = call + 1
        info = SiteInfo(loader.partition("#")[0])
        try:
            leaves = flatten(batch)
        except Exception as error:  # looking into an object of the script's runs code of the script's
            site = self._recorder.site(Site(phase, Kind.BATCH, loader, call, ""), info)
            self._recorder.missing(site, f"{type(batch).__name__} cannot be looked into: {type(error).__name__}")
            return
        for path, leaf in leaves:
            site = self._recorder.site(Site(phase, Kind.BATCH, loader, call, path), info)
            if isinstance(leaf, torch.Tensor):
                self._recorder.tensor(site, leaf)
            else:
                self._recorder.value(site, leaf)

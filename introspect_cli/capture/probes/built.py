"""What loaders, schedulers and gradient scalers were built with, and where; in which dtypes autocast computes.

A batch differs because `drop_last` does, a learning rate because a warm-up is longer: no tensor says so. A loader is
kept under the name that its batches have, the others under that of their class.

A gradient or a parameter in float32 that was computed in bfloat16 is rounded as bfloat16 is. Where outputs are recorded
they tell. Where they are not, what autocast was asked for tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from introspect_cli.capture.frames import Places
from introspect_cli.capture.naming.identity import ById, FreeNames
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.description import Description, flat
from introspect_cli.records import Phase
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call

MAX_DESCRIBED = 64
"""Loaders described at most, and as many other objects: some scripts build a loader in every step."""

_LOADER = (
    "batch_size", "drop_last", "num_workers", "sampler", "batch_sampler", "collate_fn", "generator", "worker_init_fn",
    "prefetch_factor", "persistent_workers", "in_order", "dataset",
)  # fmt: skip
_PROGRESS = frozenset(
    {
        "optimizer", "base_lrs", "last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step",
        "verbose", "_schedulers", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "mode_worse",
        "data_source", "epoch", "_IterableDataset_len_called", "_iterator",
        "_scale", "_growth_tracker", "_init_growth_tracker", "_per_optimizer_states",
    }
)  # fmt: skip
"""Attributes that say how far something has come, or hold what is described elsewhere."""


class BuiltProbe(GuardedProbe):
    """Notes settings and source line of loaders, schedulers and scalers, and autocast's dtypes."""

    name = "built"
    lost = "what loaders and schedulers are built with is"

    def __init__(self, context: Context) -> None:
        """Note nothing before `install`; the document `autocast` is new at once, and says `off`."""
        super().__init__(context)
        self._autocast: dict[str, None] = {}
        context.facts["autocast"] = lambda: {"autocast": ", ".join(self._autocast) or "off"}
        self._places = Places()
        self._lines: ById[str] = ById()
        self.loaders: dict[tuple[Phase, str], list[dict[str, Any]]] = {}
        """Settings of loaders by what they are for and name, each variant once."""
        self._names = FreeNames()
        self._waiting: list[tuple[str, str, Any]] = []
        self._described: dict[str, dict[str, dict[str, Any]]] = {}
        self._count = 0

    def _watch_autocast(self, call: Call) -> Callable[[Any], None]:
        """Called before autocast is entered; returns what notes `device dtype` (`cuda bfloat16`), if it is enabled."""

        def entered(_result: object) -> None:
            """Note the dtype, each once."""
            device = call.first.device
            if torch.is_autocast_enabled(device):
                dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                if f"{device} {dtype}" not in self._autocast:
                    self._autocast[f"{device} {dtype}"] = None
                    self._context.facts["autocast"] = lambda: {"autocast": ", ".join(self._autocast)}

        return entered

    def _watch_constructor(self, call: Call) -> Callable[[Any], None]:
        """Called before a constructor; returns what passes the new object and the caller's line to `_note_object`."""
        return lambda _: self._note_object(call.first, self._places.line(call.frame))

    def _note_object(self, thing: object, line: str) -> None:
        """Keep a new scheduler or scaler for `document`, each once, 64 in all; of a loader keep the line alone."""
        if isinstance(thing, DataLoader):
            self._lines.set(thing, line)
            return
        if (
            len(self._waiting) + sum(map(len, self._described.values())) >= MAX_DESCRIBED
            or self._names.find(thing) is not None
        ):
            return
        name = self._names.name(thing, type(thing).__name__)
        self._lines.set(thing, line)
        kind = "scalers" if isinstance(thing, torch.amp.GradScaler) else "schedulers"
        self._waiting.append((kind, name, self._lines.entries[id(thing)][0]))
        self._context.facts["built"] = self.document

    def document(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The document `settings/built`: settings by kind (`loaders`, `schedulers`, `scalers`) and name.

        Describes the schedulers and scalers that are new since the last call, if they still exist. Loaders of an
        evaluation are named `NAME (evaluation)`, further variants under one name `NAME (2)`.
        """
        waiting, self._waiting = self._waiting, []
        with self._guarded, unobserved():
            for kind, name, reference in waiting:
                thing = reference()
                if thing is not None:
                    of_kind = self._described.setdefault(kind, {})
                    of_kind[name] = _with_line(self._lines.get(thing), Description(_PROGRESS).attributes(thing))
        loaders: dict[str, dict[str, Any]] = {}
        for (phase, name), settings in self.loaders.items():
            shown = f"{name} (evaluation)" if phase is Phase.EVAL else name
            loaders |= {
                f"{shown} ({number})" if number > 1 else shown: variant for number, variant in enumerate(settings, 1)
            }
        return {**({"loaders": loaders} if loaders else {}), **self._described}

    def describe(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """Settings of a loader, as dotted names and scalars, with the line that made it.

        {} from the 65th call on, or where describing it failed.
        """
        self._count += 1
        settings: dict[str, Any] = {}
        if self._count > MAX_DESCRIBED:
            return settings
        with self._guarded, unobserved():
            held = object.__getattribute__(loader, "__dict__")
            for name in _LOADER:
                value = held.get(name)
                if name == "batch_sampler" and type(value) is BatchSampler and held.get("batch_size") is not None:
                    continue  # made by the loader itself
                if value is not None:
                    settings[name] = Description(_PROGRESS).describe(value)
            settings = _with_line(self._lines.get(loader), settings)
        return settings  # noqa: RET504 - nothing where describing it failed

    def add_loader(self, phase: Phase, name: str, settings: dict[str, Any]) -> None:
        """Add a loader's settings under name and phase, unless they are empty or equal ones are there.

        Called at its first batch in a phase.
        """
        variants = self.loaders.setdefault((phase, name), [])
        if settings and settings not in variants:
            variants.append(settings)
            self._context.facts["built"] = self.document

    def rename_loaders(self, names: dict[str, str]) -> None:
        """Rename training's loaders by old name, and drop those without a new one.

        Called when steps start from 0 again.
        """
        self.loaders = {
            (phase, names[name] if phase is Phase.DATA else name): settings
            for (phase, name), settings in self.loaders.items()
            if phase is not Phase.DATA or name in names
        }
        self._context.facts["built"] = self.document


def _with_line(line: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as pairs of dotted name and scalar, with `line` first; without it where the line is unknown."""
    return {**({"line": line} if line else {}), **dict(flat("", settings))}

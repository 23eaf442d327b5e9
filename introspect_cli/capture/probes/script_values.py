"""What a script hands on itself: values that it names, its phases, and the tensors of a checkpoint that it saves.

An averaged copy of the weights is what a run is for, and nothing sees it but `torch.save`. So tensors are recorded when
they are saved, by the file's name and their place in what is saved; what is written is not touched. States of random
generators are in checkpoints, too: they are recorded as such elsewhere, and are no product.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from introspect_cli.capture.events import RAISED
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.start import ImportWatch
from introspect_cli.records import Kind, Phase, Site, SiteInfo
from introspect_cli.script import calls
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call


_RANDOM = re.compile(r"rng|random[_ ]?state|generator", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_MERSENNE = (5056,)
"""The shape of the state of torch's generator on the CPU."""
MAX_SAVED_TENSORS = 100_000
MAX_FILE_NAMES = 20
_UNNAMED = "(memory)"


class ProductProbe(GuardedProbe):
    """Records tensors that the script saves."""

    name = "products"
    lost = "what the script saves is"

    kind = Kind.PRODUCT

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context)
        self._imports = ImportWatch({"safetensors.torch": lambda: self._put("saved files")})

    def install(self) -> None:
        """If products are recorded, watch `torch.save` now, and `safetensors.torch.save_file` once that is imported."""
        super().install()
        if Kind.PRODUCT in self._context.kinds:
            self._imports.install()

    def remove(self) -> None:
        """Put `torch.save` and the others back."""
        self._imports.remove()
        super().remove()

    def _watch_save(self, call: Call) -> Callable[[object], None]:
        """Called before something is saved; returns what records it once that has succeeded."""
        held, place = ("tensors", "filename") if call.name == "save_file" else ("obj", "f")
        return lambda result: (
            None if result is RAISED else self._record_saved(call.given(0, held), _file_label(call.given(1, place)))
        )

    def _record_saved(self, held: object, name: str) -> None:
        """Record the tensors in a saved object, 100,000 at most, without states of generators.

        Other probes record first what models hold now. In an unrecorded step only the name is noted, of 20 files.

        Args:
            held: what was saved.
            name: of the file, see `_file_label`.
        """
        if not self._recorder.wanted:
            if len(self._context.saved_unseen) < MAX_FILE_NAMES:
                self._context.saved_unseen[name] = None
            return
        clock = self._context.clock
        clock.tell(clock.on_look)
        with unobserved():
            call = self._context.count(self, name)
            saved = [pair for pair in tensors_of(held) if not _is_random(*pair)][:MAX_SAVED_TENSORS]
            info = SiteInfo()
            sites = [
                self._recorder.site(Site(Phase.FORWARD, Kind.PRODUCT, name, call, path), info) for path, _ in saved
            ]
            self._recorder.emit_many(sites, [tensor for _, tensor in saved])


def tensors_of(held: object) -> list[tuple[str, torch.Tensor]]:
    """Path and tensor for each tensor in a nested object; a module gives its parameters and buffers.

    A tensor in two places comes twice.
    """
    if issubclass(type(held), nn.Module):
        return [(f"[{name!r}]", tensor) for name, tensor in tensors_in_module(held)]
    tensors: list[tuple[str, torch.Tensor]] = []
    for path, leaf in flatten(held):
        if issubclass(type(leaf), nn.Module):
            tensors += [(f"{path}[{name!r}]", tensor) for name, tensor in tensors_in_module(leaf)]
        elif issubclass(type(leaf), torch.Tensor):
            tensors.append((path, leaf))
    return tensors


def tensors_in_module(root: Any) -> list[tuple[str, torch.Tensor]]:
    """Dotted name and tensor for each parameter and buffer in a module tree, read past the module's methods.

    A tensor that two modules share comes twice, those of a module in two places once.
    """
    tensors, waiting, seen = [], [("", root)], {id(root)}
    while waiting:
        prefix, module = waiting.pop()
        for group in (module._parameters, module._buffers):  # noqa: SLF001 - the public views may be the script's
            tensors += [(prefix + name, tensor) for name, tensor in group.items() if tensor is not None]
        for name, child in module._modules.items():  # noqa: SLF001 - as above
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append((f"{prefix}{name}.", child))
    return tensors


def _is_random(path: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor counts as a generator's state: uint8, and of shape (5056,) or at a path such as `rng_state`."""
    return tensor.dtype is torch.uint8 and (tuple(tensor.shape) == _MERSENNE or bool(_RANDOM.search(path)))


def _file_label(place: object) -> str:
    """File name without directory, each number replaced by `#`: `ckpt-#.pt`; `(memory)` where there is none.

    Args:
        place: a path or an open file.
    """
    path = getattr(place, "name", "") if type(place).__module__ == "_io" else place
    if type(path) is str or (type(path).__module__.startswith("pathlib") and isinstance(path, PurePath)):
        return _NUMBER.sub("#", PurePath(path).name) or _UNNAMED
    return _UNNAMED


class ScriptCallsProbe(GuardedProbe):
    """Records what the script reports by `introspect_cli.step`, `record` and `phase`."""

    name = "script calls"
    lost = "values that the script records itself are"

    def __init__(self, context: Context) -> None:
        """Listen to nothing before `install`."""
        super().__init__(context)
        self._wants_eval = context.clock.evaluation.wanted
        self._phase = ""

    def install(self) -> None:
        """Begin to hear the calls that the script makes of `introspect_cli`."""
        super().install()
        calls.listen(self)

    def remove(self) -> None:
        """Hear no more calls."""
        calls.unlisten(self)
        super().remove()

    def end_step(self) -> None:
        """End the step, as the script says so; from now on nothing else ends steps."""
        with self._context.guard.around("clock", "steps that the script ends itself are"):
            self._context.clock.manual_tick()

    def enter_phase(self, name: str) -> None:
        """Begin a phase of the script's, or end it with "".

        Until it ends, `PHASE/` is put before names of values, and forward passes without gradients are recorded.
        """
        if self._guarded.on:
            with self._guarded:
                self._phase = str(name)
                self._context.clock.evaluation.wanted = self._wants_eval or bool(name)

    def record_value(self, name: str, value: object) -> None:
        """Record a value in phase `forward` under `PHASE/NAME`, or NAME outside of phases; each leaf at its path.

        A leaf that is None is left out. Begins the step if it has not begun. Nothing in an unrecorded step or while a
        compiler traces the call.
        """
        if not (self._guarded.on and self._recorder.wanted) or torch.compiler.is_compiling():
            return
        with self._guarded, unobserved():
            self._context.clock.begin()
            fqn = f"{self._phase}/{name}" if self._phase else str(name)
            call = self._context.count(self, fqn)
            leaves = [(path, leaf) for path, leaf in flatten(value) if leaf is not None]
            sites = [self._recorder.site(Site(Phase.FORWARD, Kind.VALUE, fqn, call, path)) for path, _ in leaves]
            self._recorder.emit_many(sites, [leaf for _, leaf in leaves])

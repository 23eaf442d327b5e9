"""Parameters and buffers: as training finds them, as each optimizer step leaves them, and wherever else they change.

A script that loads a checkpoint in the middle of a run, copies weights from another model or clamps them by hand
changes parameters after the optimizer left them, and an optimizer with a line search changes them between the forward
passes of one step; the next forward pass then looks as if its modules computed something else. Autograd counts the
in-place writes of every tensor, and its memory has an address; writes through `.data` are not counted, and show in a
sample of the memory. A tensor with another count, address or sample than when it was recorded is recorded again.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from introspect_cli.capture import private_api, torch_distributed
from introspect_cli.capture.naming import ById, Contents, holders_in, modules_in, parameters_of, place_of, tensors_in
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.products import tensors_in_module
from introspect_cli.capture.ranks import flat
from introspect_cli.records import GIVEN, Kind, Phase
from introspect_cli.tensors.kernels import numbers_of
from introspect_cli.tensors.special import is_wrapped
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    import torch
    from torch import nn

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.capture.naming import ParameterName

    Holders = tuple[list[weakref.ref[nn.Module]], list[weakref.ref[nn.Module]]]

_PARAMETERS, _BUFFERS = frozenset({Kind.PARAM}), frozenset({Kind.BUFFER})
_BOTH = _PARAMETERS | _BUFFERS


class StateProbe(GuardedProbe):
    """Records parameters and buffers, when other probes call it."""

    name = "state"
    lost = "parameters and buffers are"

    def __init__(self, context: Context) -> None:
        """Record nothing before a model is called or an optimizer steps."""
        super().__init__(context)
        self._started: dict[str, weakref.ref[nn.Module]] = {}
        self._recorded: set[str] = set()
        self._holders: ById[Holders] = ById()
        """Of a root, the modules with tensors of their own, and those that `fully_shard` has cut."""
        self._after: ById[tuple[object, Sequence[int]]] = ById()
        self._marks: dict[int, Hashable] = {}
        """Fingerprints of tensors when they were recorded, by `id`."""
        self._fresh: set[str] = set()
        self._unheld: set[int] = set()
        self._unheld_as_of = -1
        self._step = self._called = -1
        self._own: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        """Tensors that `functional_call` has replaced in a model: dict, key and own tensor."""
        self._swapped: list[tuple[ParameterName, torch.Tensor]] = []
        """Names and tensors that such a model is about to run with."""

    def _watch_swap(self, call: Call) -> Callable[[object], None] | None:
        """Called before `functional_call`: has the tensors that it puts into a module recorded when that is called.

        Inside another module's call they are recorded at once.

        Returns:
            a function for after the call, which records the module's own tensors again if the others were recorded by
            then; None in an unrecorded step, and for a module without a name.
        """
        module, values = call.given(0, "module"), call.given(1, "parameters_and_buffers")
        if not self._recorder.wanted or not isinstance(values, dict):
            return None
        names, held = self._context.names, dict(tensors_in_module(module))
        stack = self._context.stack
        phase = stack.phase if stack.calls and stack.calls[-1] is not None else None  # None outside of recorded calls
        if phase is None and self._context.clock.trained.is_trained(module):
            names.name_holders_of(list(held.values()))  # while it holds them
        if names.find(module) is None:
            return None
        named = {key: names.parameters.name_of(own) for key, own in held.items() if values.get(key, own) is not own}
        watched = [(key, name) for key, name in named.items() if name is not None and name.watched]
        given, own = ([(name, of[key]) for key, name in watched] for of in (values, held))
        if phase is not None:
            self._write_given(given, phase)
            return lambda _result: self._write_given(own, phase)
        groups = [group for one in modules_in(module) for group in (one._parameters, one._buffers)]  # noqa: SLF001 - the public views may be the script's
        self._own = [(group, key, tensor) for group in groups for key, tensor in group.items() if tensor is not None]
        # else a transform differentiates or batches what the model holds
        has_given = not any(is_wrapped(value) for _, value in given)
        self._swapped = given if has_given else []

        def leave(_result: object) -> None:
            """Forget what was put in; record the module's own tensors again if the others were recorded."""
            waiting, self._own, self._swapped = self._swapped, [], []
            if has_given and not waiting:
                self._write_given(own, self._context.stack.phase)

        return leave

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Context in which a model holds its own tensors inside a `functional_call`; the others are back after it."""
        others = [group[key] for group, key, _ in self._own]
        for group, key, tensor in self._own:
            group[key] = tensor
        try:
            yield
        finally:
            for (group, key, _), tensor in zip(self._own, others, strict=True):
                group[key] = tensor

    def _write_given(self, given: list[tuple[ParameterName, torch.Tensor]], phase: Phase) -> None:
        """Record tensors under the names of the parameters that they stand in for, in a forward pass."""
        with unobserved():
            self._enter_step()
            calls = [self._context.count(GIVEN, name.fqn, phase) for name, _ in given]
            named = zip(given, calls, strict=True)
            sites = [self._context.site(name, phase, Kind.PARAM, GIVEN, call) for (name, _), call in named]
            self._write(sites, [tensor for _, tensor in given])

    def on_restart(self, kept: int | None) -> None:
        """Forget which tensors are recorded, as steps start from 0 again.

        Args:
            kept: the step that becomes step 0, whose records stay; None where none does.
        """
        self._step = self._called = -1 if kept is None else 0
        if kept is None:
            self._started.clear()
            self._recorded.clear()

    def on_root(self, root: nn.Module) -> None:
        """Record a root's own tensors: all at its first call, later those written to since their record.

        Inside `functional_call`, record after them the tensors that it has put in.
        """
        with self._holding():
            self._record_root(root)
        given, self._swapped = self._swapped, []
        if given:
            self._write_given(given, self._context.stack.phase)

    def _record_root(self, root: nn.Module) -> None:
        """Record those of a root's tensors that have no record, and again those written to since theirs.

        Buffers only at the first call of any root in a step. Nothing for a root without a name.
        """
        context = self._context
        if (state := context.names.find(root)) is None:
            return
        self._enter_step()
        first, self._called = self._called != self._step, self._step
        self._holders_of(root, again=first)
        if (started := self._started.get(state.fqn)) is not None:
            if started() is root:
                self._record_rewritten(root, with_buffers=first)
                return
            # Another model has taken the name of one that is gone: what it starts with is not on record.
            inside = state.fqn + "."
            self._recorded = {name for name in self._recorded if not name.startswith(inside)}
        self._started[state.fqn] = weakref.ref(root)
        context.names.refresh(root)
        whole = context.names.root_of(root)  # a part may be called by itself, and the rest is used all the same
        self._record(_filtered(self._tensors_of(whole), self._is_new), Phase.START)
        self._record_rewritten(root, with_buffers=first)  # while another root held it

    def _enter_step(self) -> None:
        """At the first call in a step, forget which names got their first record in the step before.

        Forget all that is recorded if the step before was not recorded, or no optimizer is known.
        """
        if self._step != self._recorder.step:
            # What the step before left is on record, unless that step was not captured or nobody recorded it.
            self._step, clock = self._recorder.step, self._context.clock
            self._fresh.clear()
            if self._recorder.resumed or clock.unseen_steps or not clock.has_optimizer:
                self._started.clear()
                self._recorded.clear()

    def on_look(self) -> None:
        """As the script saves or is over (`Moments.on_look`), record again what was written to since its record.

        Only in a recorded step: parameters of roots called so far, and those that an optimizer alone holds; buffers
        only if no root was called in this step yet.
        """
        if self._recorder.wanted:
            with unobserved():
                self._enter_step()
                for reference in list(self._started.values()):
                    if (root := reference()) is not None and self._context.names.find(root) is not None:
                        self._record_rewritten(root, with_buffers=self._called != self._step)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a name without a record; from then on the name counts as recorded."""
        name = self._name(tensor)
        new = set() if name is None else {name.fqn} - self._recorded
        self._recorded |= new
        self._fresh |= new
        return bool(new)

    def _record_rewritten(self, root: nn.Module, *, with_buffers: bool) -> None:
        """Record again those tensors of a root whose mark is not that of their record, or that have none.

        In phase `start`, inside an optimizer step in `optimizer`. Parameters that an optimizer alone holds are looked
        at, too.

        Args:
            root: the outermost module.
            with_buffers: True in the first call of a step alone; later, modules have written to their own buffers.
        """
        alone, contents = self._unheld_parameters(), self._tensors_of(root, _BOTH if with_buffers else _PARAMETERS)
        if alone:
            contents = [*contents[0], *[Kind.PARAM] * len(alone)], [*contents[1], *alone], contents[2]
        changed = self._rewritten(contents)
        if not changed[1]:
            return
        self._record(changed, Phase.OPTIMIZER if self._context.stack.optimizers else Phase.START, again=True)

    def _unheld_parameters(self) -> list[torch.Tensor]:
        """Parameters that an optimizer holds and no named module; which they are is cached until a name changes.

        [] where parameters are not recorded, or are pieces of flat tensors.
        """
        names = self._context.names.parameters
        if Kind.PARAM not in self._context.kinds or self._context.parts.is_active:
            return []
        is_known = self._unheld_as_of == names.changes
        if is_known and not self._unheld:
            return []
        held = [tensor for one in self._context.clock.trained.optimizers() for tensor in parameters_of(one)]
        if not is_known:
            alone = (tensor for tensor in held if (name := names.name_of(tensor)) is not None and name.makeshift)
            self._unheld_as_of, self._unheld = names.changes, set(map(id, alone))
        return [tensor for tensor in held if id(tensor) in self._unheld]

    def _rewritten(self, contents: Contents) -> Contents:
        """Those of the tensors that were written to since their record, or have none."""
        changed = set(map(id, self._recorder.summarizer.unlike(contents[1], self._marks)))
        return _filtered(contents, lambda tensor: id(tensor) in changed) if changed else ([], [], [])

    def on_root_left(self, root: nn.Module) -> None:
        """Record parameters that a forward pass has written to, such as a moving average inside a model.

        Nothing for a root that `on_root` has not recorded.
        """
        state = self._context.names.find(root)
        if state is None or state.fqn not in self._started:
            return
        with self._holding():  # walked once more: what is kept meanwhile would outlive a forward pass that raises
            changed = self._rewritten(self._tensors_of(root, _PARAMETERS))
        if changed[1]:
            self._record(changed, Phase.FORWARD, again=True)

    def look_at_buffers(self, module: nn.Module, *, after: bool = False) -> None:
        """Before a call in a forward pass, record the module's own buffers that something else has written to.

        After a call in any phase, only keep the marks that it leaves them with.
        """
        buffers = [each for each in module._buffers.values() if each is not None]  # noqa: SLF001 - the public view may be the script's
        summarizer = self._recorder.summarizer
        with private_api.no_torch_function():
            if after:
                summarizer.keep_marks(buffers, self._marks)
            elif not self._own and (changed := summarizer.unlike(buffers, self._marks)):
                with unobserved():
                    self._record(([Kind.BUFFER] * len(changed), changed, []), Phase.FORWARD, again=True)

    def on_after_optimizer(self) -> None:
        """Record every buffer of every root after an optimizer step, if buffers are recorded."""
        changes = self._context.names.parameters.changes
        for root in self._context.names.roots():
            contents = self._tensors_of(root, _BUFFERS)
            mark = None if self._holders_of(root)[1] else (place_of(*contents[1:]), changes)
            self._record_after(root, mark, Kind.BUFFER, contents[1])

    def parameters_after(self, stepper: object, parameters: list[torch.Tensor]) -> None:
        """Record the parameters that an optimizer or engine has stepped; nothing if parameters are not recorded."""
        if Kind.PARAM in self._context.kinds:
            # What is at the same place of the same optimizer under the same identity has the name it had.
            mark = self._context.names.parameters.changes, list(map(id, parameters))
            self._record_after(stepper, mark, Kind.PARAM, parameters)

    def _record_after(self, owner: object, mark: object, kind: Kind, tensors: list[torch.Tensor]) -> None:
        """Record tensors as an optimizer step leaves them; their sites are cached while `mark` stays equal.

        Args:
            owner: whose tensors these are: an optimizer, or a root.
            mark: equal to the last one where all have the names that they had; None where that is not known.
            kind: what they are.
            tensors: all of them.
        """
        cached = self._after.get(owner)
        if mark is not None and cached is not None and cached[0] == mark:
            self._write(cached[1], tensors)
            return
        sites = self._record(([kind] * len(tensors), tensors, []), Phase.OPTIMIZER)
        if len(sites) == len(tensors):  # else one has no name yet, or is not wanted yet
            self._after.set(owner, (mark, numbers_of(sites)))

    def _holders_of(self, root: nn.Module, *, again: bool = False) -> Holders:
        """`_holders` of a root, for which it is walked at the first call, and `again`.

        Modules that `fully_shard` has cut are looked for in a process group alone.
        """
        if again or (found := self._holders.get(root)) is None:
            self._context.parts.look()
            cut = filter(torch_distributed.is_cut, modules_in(root)) if self._context.parts.is_grouped else ()
            found = list(map(weakref.ref, holders_in(root))), list(map(weakref.ref, cut))
            self._holders.set(root, found)
        return found

    def _tensors_of(self, root: nn.Module, kinds: frozenset[Kind] = _BOTH) -> Contents:
        """A root's parameters and buffers of recorded kinds, each once.

        Of a parameter gathered by `fully_shard`, the shard.
        """
        holders, cut = self._holders_of(root)
        of, tensors, groups = tensors_in(holders, kinds & self._context.kinds)
        cutting = [module for reference in cut if (module := reference()) is not None]
        every = (gathered for module in cutting for gathered in torch_distributed.unsharded_of(module))
        shards = {id(whole): keeper.sharded_param for _, _, whole, keeper in every}
        return of, [shards.get(id(tensor), tensor) for tensor in tensors] if shards else tensors, groups

    def _record(self, contents: Contents, phase: Phase, *, again: bool = False) -> list[int]:
        """Record the tensors that have a name and are watched; returns the sites of these, in order.

        Args:
            contents: tensors with their kinds.
            phase: where in the step.
            again: True for a further record in this step and phase, which gets the next call number.
        """
        every = [self._site(tensor, phase, kind, again=again) for kind, tensor in zip(*contents[:2], strict=True)]
        sites = [site for site in every if site is not None]
        self._write(sites, [tensor for tensor, site in zip(contents[1], every, strict=True) if site is not None])
        return sites

    def _write(self, sites: Sequence[int], tensors: list[torch.Tensor]) -> None:
        """Emit tensors at sites, pieces of flat ones in their places, and keep their marks."""
        parts = self._context.parts
        values = [parts.placed(each, each) for each in tensors] if parts.is_active else tensors
        self._recorder.emit_many(sites, values)
        self._recorder.summarizer.keep_marks(tensors, self._marks)

    def _site(self, tensor: torch.Tensor, phase: Phase, kind: Kind, *, again: bool) -> int | None:
        """Site of a tensor, with `again` of the next call; None where it has no values or name, or is unwatched."""
        name, call = self._name(tensor), 0
        if name is None or not name.watched:
            return None
        if again:
            # The optimizer's own call 0 is how its step leaves the tensor; the first of a start is its call 0.
            used = phase is Phase.OPTIMIZER or (phase is Phase.START and name.fqn in self._fresh)
            call = int(used) + self._context.count(self, name.fqn, phase)
        return self._context.site(name, phase, kind, call=call)

    def _name(self, tensor: torch.Tensor) -> ParameterName | None:
        """Name of a tensor; None where it is lazy, emptied by ZeRO-3 without a shard here, or held by no named module.

        Where it has no name yet, all roots are walked for new tensors first.
        """
        if is_lazy(tensor) or (flat.is_emptied(tensor) and flat.shard_of(tensor) is None):
            return None
        if (name := self._context.names.parameters.name_of(tensor)) is None:
            # A buffer that the module replaced instead of writing into it: name it again.
            for root in self._context.names.roots():
                self._context.names.refresh(root)
            name = self._context.names.parameters.name_of(tensor)
        return name


def _filtered(contents: Contents, are: Callable[[torch.Tensor], bool]) -> Contents:
    """The tensors for which `are(tensor)` is true, with their kinds and an empty key; `are` is called once for each."""
    at = [position for position, tensor in enumerate(contents[1]) if are(tensor)]
    return [contents[0][position] for position in at], [contents[1][position] for position in at], []

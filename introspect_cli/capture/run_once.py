"""One forward and backward pass of a model, captured into a run of its own.

What a transformation of a model must keep is compared by running both on the same inputs, from the same random state,
with the same buffers; nothing of it may be left behind in the models that were lent to us.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from introspect_cli.capture.naming import modules_in, wrapped
from introspect_cli.capture.regions.compile import CompileProbe
from introspect_cli.capture.session import Session
from introspect_cli.records import Kind, Phase
from introspect_cli.tensors.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.records import Site


def run_once(
    model: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CaptureOptions,
    loss: Callable[[Any], torch.Tensor] | None,
    *,
    backward: bool,
    only: frozenset[Site] | None = None,
) -> None:
    """Run a model once under capture, into a run of its own; it returns when the store is closed.

    The model's gradients and buffers, and torch's random states, are restored afterwards.

    Args:
        model: a module, or any callable.
        name: FQN to give the model, where it is a module.
        args: positional inputs; copies of them are used.
        kwargs: keyword inputs; copies of them are used.
        options: what to record and where.
        loss: makes a scalar of the model's output; None for the sum over all its floating point tensors.
        backward: whether to run the backward pass and record parameter gradients.
        only: sites that may be recorded; all where None.

    Raises:
        StoreError: the run cannot be made.
        Exception: whatever the model raises.
    """
    with Session(None, options) as session:
        session.start()
        context = session.context
        assert context is not None, "torch is there, so are the probes"
        context.recorder.record_only(only)
        if isinstance(model, nn.Module):
            context.names.name_root(model, name)
            # of a compiled module those inside, but not the one that it wraps
            inner = wrapped(model) if options.compile != "boundary" else None
            if inner is not None:
                context.probe(CompileProbe).tap(child for child in modules_in(inner) if child is not inner)
        with _restoring(model):
            given = model(*_copied(args), **_copied(kwargs))
            if backward:
                total = (loss or _total)(given)
                if total.requires_grad:
                    total.backward()
                    _record_gradients(context, model)
            context.clock.tick()


def _total(given: Any) -> torch.Tensor:
    """Sum over all elements of all floating point tensors in an output, so that each element gets a gradient of 1.

    A float32 on the CPU; 0, without a gradient, where there is no such tensor.
    """
    tensors = [leaf for _, leaf in flatten(given) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    zero = torch.zeros(())
    return sum((tensor.sum().to(zero) for tensor in tensors), zero)


def _copied(values: Any) -> Any:
    """A deep copy of nested inputs, in which each tensor is a leaf of autograd with the same `requires_grad`.

    Only plain tuples, lists and dicts are looked into; any other object is copied by `copy.deepcopy`.
    """
    if isinstance(values, torch.Tensor):
        return values.detach().clone().requires_grad_(values.requires_grad)
    if type(values) in (tuple, list):
        return type(values)(_copied(value) for value in values)
    if type(values) is dict:
        return {key: _copied(value) for key, value in values.items()}
    return copy.deepcopy(values)


def _record_gradients(context: Any, model: Any) -> None:
    """Record `.grad` of each named, watched parameter that has one, at the site of an optimizer's step.

    Nothing for a plain callable, or where gradients are not recorded.
    """
    if not isinstance(model, nn.Module) or Kind.GRAD not in context.kinds:
        return
    for parameter in model.parameters():
        name = context.names.parameters.name_of(parameter)
        if name is not None and name.watched and parameter.grad is not None:
            site = context.site(name, Phase.OPTIMIZER, Kind.GRAD)
            context.recorder.emit(site, parameter.grad)


@contextmanager
def _restoring(model: Any) -> Iterator[None]:
    """Context in which a module's gradients are None at first.

    After it, gradients, buffers and torch's random states (CPU and CUDA) are as before; for a callable that is no
    module, the random states alone.
    """
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    gradients = [parameter.grad for parameter in parameters]
    values = [buffer.detach().clone() for buffer in buffers]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)

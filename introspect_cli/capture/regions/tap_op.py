"""Two operators that every way of running a model keeps: `introspect::tap` and `introspect::look`.

A compiler, a tracer or an exporter drops python that it cannot see through, but keeps calls of operators it does not
know. `tap` gives a copy of what it is given (an operator may not return its own input) and takes part in autograd, so
that the gradient of whatever uses the copy comes by as well. `look` gives nothing; it is kept because it says that it
writes to a tensor that the graph takes in. Both hand what they see to the sink, if a capture has put one in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from introspect_cli.capture.regions.taps import GRADIENT, Sink


def _tap(x: Tensor, site: str) -> Tensor:
    """`introspect::tap`: hand the tensor and its tap's text to the sink, if there is one, and return a copy of it."""
    if Sink.take is not None:
        Sink.take(x, site)
    return x.clone()


def _look(x: Tensor, order: Tensor, site: str) -> None:  # noqa: ARG001 - `order` is there to be written to
    """`introspect::look`: hand the tensor and its tap's text to the sink, if there is one; `order` is not touched."""
    if Sink.take is not None:
        Sink.take(x, site)


def _save_site(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch's signature
    ctx.site = inputs[1]


def _tap_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.introspect.tap(grad, GRADIENT + ctx.site), None


def _register() -> None:
    """Define the operators `introspect::tap` and `introspect::look`; torch allows it once in a process."""
    tap = torch.library.custom_op("introspect::tap", mutates_args=(), schema="(Tensor x, str site) -> Tensor")(_tap)
    tap.register_fake(lambda x, site: torch.empty_like(x))  # noqa: ARG005 - an operator's shapes may depend on any argument
    tap.register_autograd(_tap_gradient, setup_context=_save_site)
    # Not by `custom_op`, which raises the version of what an operator says that it writes to: checkpointing inside a
    # compiled region keeps `order` for the backward pass, and would find it written to.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _LIBRARY.define("look(Tensor x, Tensor(a!) order, str site) -> ()", tags=tags)
    _LIBRARY.impl("look", _look, "CompositeExplicitAutograd")
    _LIBRARY.impl("look", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("introspect::look", lambda x, order, site: None, lib=_LIBRARY)  # noqa: ARG005 - as above


_LIBRARY = torch.library.Library("introspect", "FRAGMENT")

if not hasattr(torch.ops.introspect, "tap"):
    _register()

ORDER = torch.zeros(())
"""Tensor that `look` declares to write to, so that compilers keep it, in order."""

NOTHING = torch.zeros(())
"""Argument of `look` for a value that is no tensor."""

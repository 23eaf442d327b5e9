"""The operators that a node of a compiler's graph would run, were it run as python.

A compiler takes in calls of functions (`linear`, `gelu`); python runs operators (`aten.addmm`, `aten.gelu`), and it is
those that are recorded of a run without a compiler. So each node is called once more, on tensors without contents, as
the compiler itself did while it traced, and the operators that come by are noted. Nothing is computed, no random number
is drawn, and no assumption about sizes is added to those that the compiler has made.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.capture import private_api
from introspect_cli.capture.ops.values import tensors
from introspect_cli.capture.regions.graph import example_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, eq=False)
class Ran:
    """One operator that came by.

    Attributes:
        func: the operator.
        args: what it was given, and
        kwargs: by name.
        result: what it gave; tensors in it have no contents.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Listener(TorchDispatchMode):
    """Notes every operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.ran: list[Ran] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ran.append(Ran(func, args, kwargs or {}, result))
        return result


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a call.

    Attributes:
        ran: the operators it runs, in order.
        result: what it gives, without contents.
    """

    ran: list[Ran]
    result: Any


NOTHING = Known([], None)
"""What is known of a call that neither takes nor gives a tensor."""


@contextlib.contextmanager
def watching(graph: fx.Graph) -> Iterator[Callable[[fx.Node], Known | None]]:
    """A function that tells the operators of a call, or None where that cannot be told; for all calls in order.

    Args:
        graph: what a compiler is given, with examples of all values.
    """
    examples = (value for node in graph.nodes for value in _tensors(example_of(node)))
    mode = next((value.fake_mode for value in examples if isinstance(value, private_api.FAKE_TENSOR)), None)
    precision: list[Any] = []

    def listen(node: fx.Node) -> Known | None:
        if private_api.autocast_ends(node.target, node.args, precision):
            return NOTHING
        given = _tensors([example_of(argument) for argument in node.all_input_nodes])
        if not given and not _tensors(example_of(node)):
            return NOTHING
        return None if mode is None else _called(node, given, mode)

    with contextlib.ExitStack() as stack:
        if mode is not None and mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        try:
            yield listen
        finally:
            private_api.leave_autocast(precision)


def _called(node: fx.Node, given: list[torch.Tensor], mode: Any) -> Known | None:
    """Call a node's function on tensors without contents, and listen."""
    listener = _Listener()
    try:
        with private_api.without_modes(), mode, torch.set_grad_enabled(_with_gradient(node, given)):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: _fresh(example_of(argument)))
            with listener:
                if node.op == "call_method":
                    result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    assert callable(node.target)
                    result = node.target(*args, **kwargs)
    except Exception:  # what cannot be called out of its place (a guard on values, a nested graph) is not told
        return None
    return Known(listener.ran, result) if _alike(result, example_of(node)) else None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for _, item in tensors("", value)]


def _with_gradient(node: fx.Node, given: list[torch.Tensor]) -> bool:
    """Whether gradients were on at a call: off if what came in needs one and nothing that came out does."""
    came_out = [value for value in _tensors(example_of(node)) if value.is_floating_point() or value.is_complex()]
    needed = any(value.requires_grad for value in given)
    return not needed or any(value.requires_grad for value in came_out) or not came_out


def _fresh(value: Any) -> Any:
    """A copy of a value without contents, so that a call which writes in place leaves the original as it is."""
    return pytree.tree_map(_copied, value)


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with torch.enable_grad():
        whole = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        return whole.requires_grad_().clone() if value.requires_grad else whole


def _alike(result: Any, wanted: Any) -> bool:
    """Whether a call gave tensors of the same types and sizes as when it was traced."""
    one, two = _tensors(result), _tensors(wanted)
    return len(one) == len(two) and all(
        a.dtype == b.dtype and a.dim() == b.dim() for a, b in zip(one, two, strict=True)
    )

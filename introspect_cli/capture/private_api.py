"""Every private name of torch that capture leans on, in one place, with what is lost without it.

Each is looked up once, here, with a fallback; `tests/capture/test_private_api.py` notices when one moves. Those of
`torch.distributed` are in `torch_distributed`. Attributes of objects, and what `tensors` needs, which may not
import this file, stand where they are used and are listed in the test of this file, which finds any other underscore of
torch's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_C: Any = torch._C  # noqa: SLF001 - this file is where torch's private names are gathered


def _class_named(module: str, name: str) -> Any:
    """A class of torch's by module and name, imported now.

    `()`, which nothing is an instance of, where it is missing.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # pragma: no cover - no torch in the tested range lacks it
        return ()


tracing_state: Callable[[], object] = getattr(_C, "_get_tracing_state", lambda: None)
"""Not None inside `torch.jit.trace`. Without it, tracing would record our kernels' reads as constants."""

graph_task: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)
"""-1 outside a backward pass of this thread. Without it, recomputed forwards are taken for new ones."""

no_torch_function: Any = getattr(_C, "DisableTorchFunction", contextlib.nullcontext)
"""Hides what runs inside from the script's own torch-function modes and tensor subclasses. Without it, they see us."""

compile_flags: Any = torch.compiler
"""Its `_is_compiling_flag` says that something is compiled or exported."""

FAKE_TENSOR: Any = _class_named("torch._subclasses.fake_tensor", "FakeTensor")
"""Class of shape-only tensors. Without it, tracing by export is counted as module calls."""


def scale_of(scaler: Any) -> torch.Tensor | None:
    """The scale tensor of a gradient scaler, whose value is not read; None before its first use."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def handed_on(operator: Any, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator below autograd: kernels at dispatch keys that come before are passed by.

    Where torch lacks this, collectives are not recorded.
    """
    return operator.redispatch(keys & _C._after_autograd_keyset, *args, **kwargs)  # noqa: SLF001 - told in the docstring


def take_out(library: Any) -> None:
    """Remove a library's kernels from torch's dispatcher now. Where torch lacks this, collectives are not recorded."""
    library._destroy()  # noqa: SLF001 - torch does it itself only when the object goes


LOADER_ITERATOR: Any = _class_named("torch.utils.data.dataloader", "_BaseDataLoaderIter") or None
"""Class of a DataLoader's iterators. Without it, batches are not observed."""

MODULE_WRAPPED_CALL = "_compiled_call_impl"
"""Set on a module by `Module.compile()`. Without it, what such a region hides is not marked as unseen."""

COMPILERS_GRAPH: Any = _class_named("torch.fx._lazy_graph_module", "_LazyGraphModule")
"""Class of graph modules that compiler backends make. Without it, such backends show an extra `GraphModule`."""

DYNAMO_GRAPH_MARK = "compile_subgraph_reason"
"""Attribute of graph modules that Dynamo runs. Without it, eager backends show an extra `GraphModule`."""


_CompileContext: Any = getattr(getattr(torch, "_guards", None), "CompileContext", None)


def compiling() -> bool:
    """Whether this thread compiles a region now.

    Where torch lacks this, constants a compiler computes count as a run.
    """
    return _CompileContext is not None and _CompileContext.try_get() is not None


running_node: Callable[[], Any] = getattr(_C, "_current_autograd_node", lambda: None)
"""The autograd node that this thread is running, None outside a backward pass. Without it, operators of the backward
pass are recorded outside every module."""

next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: -1)
"""The number that the next autograd node of this thread gets. Without it, as above."""


_frames: Any = getattr(getattr(_C, "_dynamo", None), "eval_frame", None)

set_compiler_callback: Any = getattr(_frames, "set_eval_frame", None)
"""Exchange what Dynamo has called for each frame of this thread. Without it, it compiles introspect's frames after a
graph break."""


compiler_callback: Any = getattr(_frames, "get_eval_frame_callback", None)
"""Tell it. Without it, as above."""


def pass_by(code: CodeType) -> None:
    """Have Dynamo run frames of a code object as they are.

    Where torch lacks this, they are compiled after a graph break.
    """
    give, strategy, action = (
        getattr(_frames, name, None) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    )
    if give is not None and strategy is not None and action is not None:
        give(code, strategy(action.SKIP, action.DEFAULT))


push_mode: Callable[[Any], None] = getattr(_C, "_push_on_torch_dispatch_stack", lambda _mode: None)
"""Put a dispatch mode on this thread's stack. `with mode:` does more: it makes the compiler skip whole frames."""

modes_pushed: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)
"""Number of dispatch modes on this thread's stack. Without it, operators are not observed."""

_mode_at: Callable[[int], Any] = getattr(_C, "_get_dispatch_stack_at", lambda _index: None)


pop_mode: Callable[[], Any] = functools.partial(getattr(_C, "_pop_torch_dispatch_stack", bool), None)
"""Take the top dispatch mode off this thread's stack."""


def top_mode() -> Any:
    """The dispatch mode on top of this thread's stack, None where there is none."""
    count = modes_pushed()
    return _mode_at(count - 1) if count else None


_NOTHING: frozenset[int] = frozenset()
compiler: list[tuple[dict[int, Any], frozenset[int]]] = []  # its backends, and entries; found once


def compiled_entries() -> frozenset[int]:
    """`id` of the code of each function through which compiled regions are entered; empty where nothing was compiled.

    They are defined inside one method of the compiler's. Where torch lacks this, operators that a compiled region runs
    one by one are recorded as if they were the script's. Asked for each operator, so the search is done once.
    """
    if not compiler:
        module = sys.modules.get("torch._dynamo.eval_frame")
        context = getattr(module, "_TorchDynamoContext", None)
        if context is None:  # not there, or being imported now
            return _NOTHING
        constants = getattr(getattr(vars(context).get("__call__"), "__code__", None), "co_consts", ())
        entries = frozenset(id(constant) for constant in constants if isinstance(constant, CodeType))
        compiler.append((getattr(module, "cached_backends", {0: True}), entries))
    # Functions of torch's own that must not be compiled leave a backend that is None there.
    backends, entries = compiler[0]
    is_empty = not backends or (len(backends) == 1 and None in backends.values())
    return _NOTHING if is_empty else entries

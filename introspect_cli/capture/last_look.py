"""A last look at what a training run has come to, without watching it.

To say that a capture changes nothing, the parameters at the end of a run must be known that was not captured. As the
interpreter ends, the garbage collector's list of live objects is searched for modules and optimizers. A function's
locals are gone by then, so every optimizer is kept alive from the moment it is built: it holds the parameters it
trains, and keeping it changes nothing but how long its memory is held. What is found is hashed; names and addresses
stay out, so that two processes can be compared.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.environment.start import Start, numpy_state, prepare_torch, python_state
from introspect_cli.script.ending import Ending, leave
from introspect_cli.script.run import run
from introspect_cli.script.target import Target

if TYPE_CHECKING:
    from pathlib import Path

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.script.target import Target

_KEPT = 64
"""Optimizers kept alive at most, the latest ones."""


def install(report: Path) -> None:
    """Look when the interpreter ends, and write what was found to `report`; a forked child does not."""
    kept: list[Any] = []
    owner = os.getpid()
    start = Start(lambda: _keep_optimizers(kept))
    start.install()

    def look() -> None:
        if os.getpid() == owner:
            report.write_text(json.dumps(looked_at(kept, start.states)), encoding="utf-8")

    atexit.register(look)


def run_bare(target: Target, options: CaptureOptions) -> int:
    """Run a script with nothing of a capture's but its seed and its flags.

    Args:
        target: what to run.
        options: of which only `seed` and `deterministic` count.

    Raises:
        SystemExit: always, with the script's exit code.
    """
    seed, deterministic = options.seed, options.deterministic
    start = Start(lambda: prepare_torch(seed, deterministic=deterministic), seed=seed, deterministic=deterministic)

    def ended(_: Ending) -> None:
        pass

    leave(run(target, started=start.install, ended=ended).exit_code)


def _keep_optimizers(kept: list[Any]) -> None:
    from torch.optim import Optimizer

    built = Optimizer.__init__

    @functools.wraps(built)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands in for Optimizer.__init__
        built(self, *args, **kwargs)
        kept.append(self)
        del kept[:-_KEPT]

    Optimizer.__init__ = __init__  # type: ignore[method-assign]


def looked_at(kept: list[Any], began: dict[str, bytes | None]) -> dict[str, Any]:
    """Hashes of all that is there: modules and optimizers (sorted, since no order is theirs), generators.

    Args:
        kept: optimizers, in the order in which they were built.
        began: states of the generators of python and numpy before the script; nobody seeds them, so one that was not
            drawn from differs between any two processes.

    Returns:
        `optimizers`: one hash each, of parameters, gradients and state; `modules`: sorted hashes of live modules that
        no other module holds; `generators`: a hash each; `tensors`: how many tensors were looked at.
    """
    looked = _Looked()
    result: dict[str, Any] = {"optimizers": [], "modules": [], "generators": {}}
    for name, state in (("python", python_state()), ("numpy", numpy_state())):
        if state is not None:
            result["generators"][name] = "untouched" if state == began.get(name) else _digest([state])
    torch = sys.modules.get("torch")
    if torch is not None:
        result["generators"]["torch"] = looked.tensor(torch.get_rng_state())
        if torch.cuda.is_initialized():
            for number in range(torch.cuda.device_count()):
                result["generators"][f"cuda:{number}"] = looked.tensor(torch.cuda.get_rng_state(number))
        result["optimizers"] = [looked.optimizer(optimizer) for optimizer in kept]
        result["modules"] = sorted(looked.module(module) for module in _roots(torch.nn.Module))
    return {**result, "tensors": looked.count}


def _roots(cls: type) -> list[Any]:
    import gc

    live = [thing for thing in gc.get_objects() if issubclass(type(thing), cls) and "_modules" in vars(thing)]
    held = {id(child) for module in live for child in vars(module)["_modules"].values() if child is not None}
    return [module for module in live if id(module) not in held]


class _Looked:
    """Hashes tensors, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def tensor(self, tensor: Any) -> str:
        """A hash of a tensor's dtype, shape and bits; of its description where its bits cannot be had."""
        import torch

        self.count += 1
        try:
            whole = tensor.detach()
            whole = whole.to_dense() if whole.layout != torch.strided else whole
            flat = whole.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return _digest([f"{tensor.dtype} {tuple(tensor.shape)}".encode(), data])
        except Exception as error:  # some sorts of tensors have no bits to give; the script is over, no probe to guard
            return f"not seen: {type(error).__name__}"

    def optimizer(self, optimizer: Any) -> str:
        """A hash of the parameters an optimizer holds, their gradients, and its state."""
        parts = [type(optimizer).__name__]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parts.append(self.tensor(parameter))
                if parameter.grad is not None:
                    parts.append(self.tensor(parameter.grad))
                parts += self.values(optimizer.state.get(parameter, {}))
        return _digest(part.encode() for part in parts)

    def values(self, state: Any) -> list[str]:
        """Hashes of the tensors and plain values in an optimizer's state."""
        import torch

        if isinstance(state, torch.Tensor):
            return [self.tensor(state)]
        if isinstance(state, dict):
            return [part for key, value in state.items() for part in (repr(key), *self.values(value))]
        if isinstance(state, (list, tuple)):
            return [part for value in state for part in self.values(value)]
        return [repr(state)] if isinstance(state, (bool, int, float, str)) else []

    def module(self, module: Any) -> str:
        """A hash of a module's parameters and buffers."""
        parts = [type(module).__name__]
        for inner in module.modules():
            for group in (vars(inner).get("_parameters") or {}, vars(inner).get("_buffers") or {}):
                for name, tensor in group.items():
                    if tensor is not None:
                        parts += [name, self.tensor(tensor)]
        return _digest(part.encode() for part in parts)


def _digest(parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()

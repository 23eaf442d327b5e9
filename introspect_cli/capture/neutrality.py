"""`capture --verify-neutral`: does this script train the same when it is watched?

That a capture changes nothing is a promise; for one's own script it should be a measurement. The script runs in fresh
processes, once watched and once bare, both with a last look at parameters, optimizer state and generators as the
interpreter ends, and everything is compared, output and exit code included. Where they differ, a second bare run tells
a script that is not deterministic by itself from one that the capture disturbed.

For the last look the garbage collector's list of live objects is searched for modules and optimizers. A function's
locals are gone by then, so every optimizer is kept alive from its first step on: it holds the parameters it trains, and
keeping it changes nothing but how long its memory is held. What is found is hashed; names and addresses
stay out, so that two processes can be compared.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.start import Start, numpy_state, prepare_torch, python_state
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED
from introspect_cli.script.run import run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.script.target import Target


_COMPUTED = ("exit code", "parameters and optimizer state", "random generators")
"""Aspects that say how the script trained; what it printed may hold times."""


def run_child(given: Sequence[str], words: Sequence[str], *, mode: str, output: Path | None = None) -> dict[str, Any]:
    """Run the script once in a fresh process, with an empty stdin, and wait for its end; what can be compared, by name.

    Where the process leaves no report of its last state, the aspects that come from it are None.

    Args:
        given: options of `capture` as they were given.
        words: the script and its arguments.
        mode: `watched` or `bare`.
        output: the run's directory; None for a fresh one.
    """
    import subprocess  # not for a bare run, which nothing of this is to be seen in
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "look.json"
        command = [sys.executable, "-m", "introspect_cli", "capture", *given, "--no-verify-neutral"]
        command += ["--last-look", f"{mode}:{report}"]
        command += ["-o", str(output)] if output is not None else []
        done = subprocess.run(  # noqa: S603 - the script is the user's own
            [*command, "-q", *words], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        look = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    printed = {"standard output": done.stdout, "standard error": done.stderr}
    return {**dict.fromkeys(_COMPUTED), **look, "exit code": done.returncode, **printed}


def verify_neutral(given: Sequence[str], words: Sequence[str], output: Path) -> tuple[int, str]:
    """Run the script watched, into `output`, and bare, and compare all aspects; print what the watched run printed.

    Only if they differ, it runs bare once more.

    Returns:
        exit code and sentence: SAME where all aspects are equal, or those that differ also differ between two bare
        runs and are only output; UNDECIDED where no tensor was found, or two bare runs differ in what they computed;
        else DIVERGED.
    """
    watched = run_child(given, words, mode="watched", output=output)
    for shown, data in ((sys.stdout, watched["standard output"]), (sys.stderr, watched["standard error"])):
        shown.buffer.write(data)
        shown.flush()
    bare = run_child(given, words, mode="bare")
    different = _differing(watched, bare)
    tensors = len(bare[_COMPUTED[1]] or ())
    agree = f"neutral: the runs with and without a capture agree in {tensors:,} tensors, the random generators"
    if not different and tensors:
        return SAME, f"{agree}, standard output and error, and the exit code"
    if not different:
        return UNDECIDED, (
            "cannot tell: output and exit code agree, but the process left no parameters to look at "
            "(it never imported torch, or did not end through python)"
        )
    by_itself = _differing(bare, run_child(given, words, mode="bare"))
    if not by_itself.keys().isdisjoint(_COMPUTED):
        return UNDECIDED, (
            "cannot tell: the script is not deterministic by itself, two runs without a capture differ in "
            f"{', '.join(by_itself)} (--seed and --deterministic may make it so)"
        )
    if caused := [name for name in different if name not in by_itself]:
        return DIVERGED, (
            f"not neutral: the runs with and without a capture differ in {', '.join(caused)}; please report this"
        )
    return SAME, f"{agree} and the exit code; {', '.join(by_itself)} differs between runs without a capture, too"


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, None]:
    """Names of the aspects whose values in two runs are not equal."""
    return {name: None for name, value in a.items() if value != b[name]}


MAX_KEPT = 64
"""Optimizers kept alive at most, the latest ones."""


def install(report: Path) -> None:
    """At the interpreter's end, write hashes of models, optimizers and generators to `report` as JSON.

    Until then keeps the last 64 optimizers alive that have stepped. A forked child writes nothing.
    """
    kept: dict[int, Any] = {}
    owner = os.getpid()

    def keep(optimizer: Any, *_: object) -> None:
        kept[id(optimizer)] = optimizer
        if len(kept) > MAX_KEPT:
            del kept[next(iter(kept))]

    def torch_imported() -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(keep)

    start = Start(torch_imported)
    start.install()

    def look() -> None:
        if os.getpid() == owner:
            report.write_text(json.dumps(looked_at([*kept.values()], start.states)), encoding="utf-8")

    atexit.register(look)


def run_bare(target: Target, options: CaptureOptions) -> BaseException | None:
    """Run a script without a capture, with its seed and deterministic flags alone; returns what it raised.

    Args:
        target: what to run.
        options: of which only `seed` and `deterministic` count.
    """
    seed, deterministic = options.seed, options.deterministic
    start = Start(lambda: prepare_torch(seed, deterministic=deterministic), seed=seed, deterministic=deterministic)
    return run(target, started=start.install, ended=lambda _: None).raised


def looked_at(kept: list[Any], began: dict[str, bytes | None]) -> dict[str, Any]:
    """Sorted hashes of tensors, and a hash of each random generator.

    The tensors are parameters, gradients and state of optimizers, and parameters and buffers of live modules.

    Args:
        kept: optimizers.
        began: states of the generators of python and numpy before the script; nobody seeds them, so one that was not
            drawn from differs between any two processes: its entry is `untouched`.
    """
    generators = {
        name: "untouched" if state == began.get(name) else hashlib.sha256(state).hexdigest()
        for name, state in (("python", python_state()), ("numpy", numpy_state()))
        if state is not None
    }
    hashes: list[str] = []
    if (torch := sys.modules.get("torch")) is not None:
        import gc

        from introspect_cli.tensors.flatten import flatten

        gc.collect()  # what nobody holds goes at other times in another process
        devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        generators["torch"] = _hash_of(torch.get_rng_state())
        generators |= {f"cuda:{at}": _hash_of(torch.cuda.get_rng_state(at)) for at in devices}
        live = [vars(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
        held = [each.get(name) for each in live for name in ("_parameters", "_buffers")]
        held += [part for optimizer in kept for part in (optimizer.param_groups, list(optimizer.state.values()))]
        tensors = {id(leaf): leaf for _, leaf in flatten(held) if isinstance(leaf, torch.Tensor)}.values()
        gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        hashes = sorted(map(_hash_of, [*tensors, *gradients]))
    return dict(zip(_COMPUTED[1:], (hashes, generators), strict=True))


def _hash_of(tensor: Any) -> str:
    """A hash of a tensor's dtype, shape and bits; `not seen: <error>` in place of bits that cannot be read."""
    import torch

    try:
        whole = tensor.detach()
        whole = whole.to_dense() if whole.layout != torch.strided else whole
        flat = whole.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    except Exception as error:  # some sorts of tensors have no bits to give; the script is over, no probe to guard
        data = f"not seen: {type(error).__name__}".encode()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data).hexdigest()

"""`capture --verify-neutral`: does this script train the same when it is watched?

That a capture changes nothing is a promise; for one's own script it should be a measurement. The script runs in fresh
processes, once watched and once bare, both with a last look at parameters, optimizer state and generators as the
interpreter ends, and everything is compared, output and exit code included. Where they differ, a second bare run tells
a script that is not deterministic by itself from one that the capture disturbed.

For the last look the garbage collector's list of live objects is searched for modules and optimizers. A function's
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.start import Start, numpy_state, prepare_torch, python_state
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED
from introspect_cli.script.run import run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.script.target import Target


_COMPUTED = ("exit code", "parameters and optimizer state", "modules", "random generators")
"""Aspects that say how the script trained; what it printed may hold times."""
_TENSORS = "tensors"
"""How many tensors were looked at, among the aspects; 0 where the interpreter did not end by itself."""


def run_child(
    given: Sequence[str], words: Sequence[str], *, mode: str, output: Path | None = None, show: bool = False
) -> dict[str, Any]:
    """Run the script once in a fresh process, with an empty stdin, and wait for its end; what can be compared, by name.

    Where the process leaves no report of its last state, the aspects that come from it are None, and no tensors count.

    Args:
        given: options of `capture` as they were given.
        words: the script and its arguments.
        mode: `watched` or `bare`.
        output: the run's directory; None for a fresh one.
        show: print what the script has printed, at its end.
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
    if show:
        for shown, data in ((sys.stdout, done.stdout), (sys.stderr, done.stderr)):
            shown.buffer.write(data)
            shown.flush()
    printed = {"standard output": done.stdout, "standard error": done.stderr}
    looked = dict.fromkeys(_COMPUTED) | {_TENSORS: 0} | look
    return {**looked, "exit code": done.returncode, **printed}


def verify_neutral(given: Sequence[str], words: Sequence[str], output: Path) -> tuple[int, str]:
    """Run the script watched, into `output`, and bare, and compare all aspects; print what the watched run printed.

    Only if they differ, it runs bare once more.

    Returns:
        exit code and sentence: SAME where all aspects are equal, or those that differ also differ between two bare
        runs and are only output; UNDECIDED where no tensor was found, or two bare runs differ in what they computed;
        else DIVERGED.
    """
    watched = run_child(given, words, mode="watched", output=output, show=True)
    bare = run_child(given, words, mode="bare")
    different = _differing(watched, bare)
    agree = f"neutral: the runs with and without a capture agree in {bare[_TENSORS]:,} tensors, the random generators"
    if not different and bare[_TENSORS]:
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
            f"{_listed(by_itself)} (--seed and --deterministic may make it so)"
        )
    if caused := [name for name in different if name not in by_itself]:
        return DIVERGED, (
            f"not neutral: the runs with and without a capture differ in {_listed(caused)}; please report this"
        )
    return SAME, f"{agree} and the exit code; {_listed(by_itself)} differs between runs without a capture, too"


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, None]:
    """Names of the aspects whose values in two runs are not equal."""
    return {name: None for name, value in a.items() if name != _TENSORS and value != b[name]}


def _listed(names: Iterable[str]) -> str:
    """Names for a sentence: `a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


MAX_KEPT = 64
"""Optimizers kept alive at most, the latest ones."""


def install(report: Path) -> None:
    """At the interpreter's end, write hashes of models, optimizers and generators to `report` as JSON.

    Until then keeps the last 64 optimizers alive. A forked child writes nothing.
    """
    kept: list[Any] = []
    owner = os.getpid()
    start = Start(lambda: _keep_optimizers(kept))
    start.install()

    def look() -> None:
        if os.getpid() == owner:
            report.write_text(json.dumps(looked_at(kept, start.states)), encoding="utf-8")

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


def _keep_optimizers(kept: list[Any]) -> None:
    """Patch `Optimizer.__init__`, for good, so that `kept` always has the last 64 optimizers that were built."""
    from torch.optim import Optimizer

    built = Optimizer.__init__

    @functools.wraps(built)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands in for Optimizer.__init__
        """Build the optimizer as torch would, and append it to `kept`, of which the last 64 stay."""
        built(self, *args, **kwargs)
        kept.append(self)
        del kept[:-MAX_KEPT]

    Optimizer.__init__ = __init__  # type: ignore[method-assign]


def looked_at(kept: list[Any], began: dict[str, bytes | None]) -> dict[str, Any]:
    """Hashes of live modules, of optimizers and of the random generators.

    Args:
        kept: optimizers, in the order in which they were built.
        began: states of the generators of python and numpy before the script; nobody seeds them, so one that was not
            drawn from differs between any two processes: its entry is `untouched`.

    Returns:
        of the optimizers a hash for each, of parameters, gradients and state; sorted hashes of what each live module
        holds itself; of the generators a hash for each; and how many tensors were hashed.
    """
    generators = {
        name: "untouched" if state == began.get(name) else _digest([state])
        for name, state in (("python", python_state()), ("numpy", numpy_state()))
        if state is not None
    }
    optimizers: list[str] = []
    modules: list[str] = []
    hashed = 0
    if (torch := sys.modules.get("torch")) is not None:
        import gc

        from introspect_cli.tensors.flatten import flatten

        def hash_of(thing: object, held: object) -> str:
            """A hash of a thing's class and of what it holds (see `_bits_of`)."""
            nonlocal hashed
            leaves = flatten(held)
            hashed += sum(isinstance(leaf, torch.Tensor) for _, leaf in leaves)
            return _digest([type(thing).__name__.encode(), *(part for pair in leaves for part in _bits_of(*pair))])

        devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
        generators["torch"] = hash_of(None, torch.get_rng_state())
        generators |= {f"cuda:{at}": hash_of(None, torch.cuda.get_rng_state(at)) for at in devices}
        for optimizer in kept:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            held = [(each, each.grad, optimizer.state.get(each, {})) for each in parameters]
            optimizers.append(hash_of(optimizer, held))
        live = [vars(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
        modules += [hash_of(held, [held.get("_parameters"), held.get("_buffers")]) for held in live]
    return dict(zip(_COMPUTED[1:], (optimizers, sorted(modules), generators), strict=True)) | {_TENSORS: hashed}


def _bits_of(path: str, leaf: Any) -> list[bytes]:
    """The path of a leaf, and a tensor's dtype, shape and bits, or the repr of a number or a text.

    `not seen: <error>` for bits that cannot be read.
    """
    import torch

    if not isinstance(leaf, torch.Tensor):
        return [path.encode(), repr(leaf).encode() if isinstance(leaf, (bool, int, float, str)) else b""]
    try:
        whole = leaf.detach()
        whole = whole.to_dense() if whole.layout != torch.strided else whole
        flat = whole.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return [path.encode(), f"{leaf.dtype} {tuple(leaf.shape)}".encode(), data]
    except Exception as error:  # some sorts of tensors have no bits to give; the script is over, no probe to guard
        return [path.encode(), f"not seen: {type(error).__name__}".encode()]


def _digest(parts: list[bytes]) -> str:
    """BLAKE2b digest over byte strings, each with its length before it; 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()

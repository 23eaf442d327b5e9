"""`capture --verify-neutral`: does this script train the same when it is watched?

That a capture changes nothing is a promise; for one's own script it should be a measurement. The script runs in fresh
processes, once watched and once bare, both with a last look at parameters, optimizer state and generators as the
interpreter ends, and everything is compared, output and exit code included. Where they differ, a second bare run tells
a script that is not deterministic by itself from one that the capture disturbed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Sequence


_COMPUTED = ("exit code", "parameters and optimizer state", "modules", "random generators")
"""Aspects that say how the script trained; what it printed may hold times."""


@dataclass(frozen=True)
class Outcome:
    """One run of the script, as seen from outside.

    Attributes:
        aspects: what can be compared, by name.
        tensors: how many tensors were looked at; 0 where the interpreter did not end by itself.
    """

    aspects: dict[str, Any] = field(default_factory=dict)
    tensors: int = 0


@dataclass(frozen=True)
class Finding:
    """What a few runs have shown.

    Attributes:
        exit_code: `SAME` neutral, `DIVERGED` not neutral, `UNDECIDED` could not be told.
        sentence: in words.
    """

    exit_code: int
    sentence: str


def run_child(
    given: Sequence[str], words: Sequence[str], *, mode: str = "", output: Path | None = None, show: bool = False
) -> Outcome:
    """Run the script once in a fresh process.

    Args:
        given: options of `capture` as they were given.
        words: the script and its arguments.
        mode: `watched`, `bare`, or "" for a plain capture without a last look.
        output: the run's directory, where there is one.
        show: pass on what the script prints.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "look.json"
        command = [sys.executable, "-m", "introspect_cli", "capture", *given, "--no-verify-neutral", "--repeat", "1"]
        command += ["--last-look", f"{mode}:{report}"] if mode else []
        command += ["-o", str(output)] if output is not None else []
        process = subprocess.Popen(  # noqa: S603 - the script is the user's own
            [*command, "-q", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        printed = _read(process, show=show)
        look = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    aspects = {
        "exit code": process.returncode,
        "parameters and optimizer state": look.get("optimizers"),
        "modules": look.get("modules"),
        "random generators": look.get("generators"),
        "standard output": printed[0],
        "standard error": printed[1],
    }
    return Outcome(aspects, look.get("tensors", 0))


def _read(process: subprocess.Popen[bytes], *, show: bool) -> tuple[bytes, bytes]:
    kept: list[list[bytes]] = [[], []]

    def drain(number: int, source: Any, shown: Any) -> None:
        while chunk := source.read1(65536):
            kept[number].append(chunk)
            if show:
                shown.buffer.write(chunk)
                shown.flush()

    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [threading.Thread(target=drain, args=(number, *pair)) for number, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    process.wait()
    return b"".join(kept[0]), b"".join(kept[1])


def differing(a: Outcome, b: Outcome) -> list[str]:
    """Aspects in which two outcomes are not equal."""
    return [name for name, value in a.aspects.items() if value != b.aspects[name]]


def verify_neutral(given: Sequence[str], words: Sequence[str], output: Path) -> Finding:
    """Run the script watched, into a run's directory, and bare, and compare."""
    watched = run_child(given, words, mode="watched", output=output, show=True)
    bare = run_child(given, words, mode="bare")
    return judge(watched, bare, lambda: run_child(given, words, mode="bare"))


def judge(watched: Outcome, bare: Outcome, run_again: Any) -> Finding:
    """Say what a watched and a bare run show; where the two differ, the script is run bare once more."""
    different = differing(watched, bare)
    if not different:
        if not bare.tensors:
            return Finding(
                UNDECIDED,
                "cannot tell: output and exit code agree, but the process left no parameters to look at "
                "(it never imported torch, or did not end through python)",
            )
        return Finding(
            SAME,
            f"neutral: the runs with and without a capture agree in {bare.tensors:,} tensors, the random generators, "
            "standard output and error, and the exit code",
        )
    by_itself = differing(bare, run_again())
    ours = [name for name in different if name not in by_itself]
    if [name for name in by_itself if name in _COMPUTED]:
        return Finding(
            UNDECIDED,
            "cannot tell: the script is not deterministic by itself, two runs without a capture differ in "
            f"{_listed(by_itself)} (--seed and --deterministic may make it so)",
        )
    if ours:
        return Finding(
            DIVERGED, f"not neutral: the runs with and without a capture differ in {_listed(ours)}; please report this"
        )
    return Finding(
        SAME,
        f"neutral: the runs with and without a capture agree in {bare.tensors:,} tensors, the random generators and "
        f"the exit code; {_listed(by_itself)} differs between runs without a capture, too",
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

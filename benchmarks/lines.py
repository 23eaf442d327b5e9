"""In how many commits does `diff` name the planted statement first?

`single`: a fixture's planted fault as the only change of the code, and options with another default. `mixed`: fifty of
these, in a commit that renames, moves or adds things beside it. `same`: such commits without a fault, which have to be
the same. `own`: pairs of small scripts, each for something that was once told wrong (`fixtures/refactorings/pairs.py`).

    python benchmarks/lines.py [single|mixed|same|own ...] [--only PATTERN] [--keep DIRECTORY] [--jobs N] [--verbose]
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from cases import FIXTURES, load_cases, load_field_cases
from forks import Forks

if TYPE_CHECKING:
    from collections.abc import Callable

    from cases import Case

sys.path.insert(0, str(FIXTURES / "refactorings"))
import rewrites

SETS = ("single", "mixed", "same", "own")
PLANT = ("--fault", "--bug")


@dataclass(frozen=True)
class Pair:
    """Two versions of a script.

    Attributes:
        name: which set, and which of it.
        script: the file that is run.
        args: its arguments.
        a: its files before, by name.
        b: its files after.
        b_lines: lines of b that hold the planted change, as file and number.
        a_lines: lines that only a has.
        options: of the capture.
    """

    name: str
    script: str
    args: tuple[str, ...]
    a: dict[str, str]
    b: dict[str, str]
    b_lines: frozenset[tuple[str, int]]
    a_lines: frozenset[tuple[str, int]]
    options: tuple[str, ...] = ()


def single(every: int = 1) -> list[Pair]:
    """Every planted fault that is one of the code, or one of so many."""
    return [make() for make in _faults()[::every]]


def _faults() -> list[Callable[[], Pair]]:
    """What makes the pair of each planted fault, in their order: rewriting all of them takes long."""
    return [
        partial(_fault, case, *case.b.args[len(case.a.args) :])
        for case in [*load_cases(), *load_field_cases()]
        if case.expect and not case.a.options and _is_of_code(case)
    ]


def _is_of_code(case: Case) -> bool:
    """Whether b has one option more than a, which plants a fault or has a default that can be another."""
    option, *values = case.b.args[len(case.a.args) :] or ("",)
    if case.b.args != (*case.a.args, option, *values) or len(values) != 1 or option in case.a.args:
        return False
    return option in PLANT or rewrites.with_default(_without_fault(case.a.script), option, *values) is not None


@cache
def _without_fault(script: str) -> str:
    return rewrites.planted((FIXTURES / script).read_text(encoding="utf-8"), "none")


def _fault(case: Case, option: str, value: str) -> Pair:
    a = _without_fault(case.a.script)
    text = (FIXTURES / case.a.script).read_text(encoding="utf-8")
    b = rewrites.planted(text, value) if option in PLANT else rewrites.with_default(a, option, value)
    assert b is not None
    return _pair(f"single/{case.name}", Path(case.a.script).name, case.a.args, a, b, ())


def _pair(name: str, script: str, args: tuple[str, ...], a: str, b: str, mix: tuple[str, ...]) -> Pair:
    before, after = (rewrites.rewritten(text, script, mix) for text in (a, b))
    b_lines = {(file, n) for file in after for n in rewrites.differing_lines(before.get(file, ""), after[file])[0]}
    a_lines = frozenset((script, n) for n in rewrites.differing_lines(a, b)[1])
    return Pair(name, script, args, {script: a + "\n"}, after, frozenset(b_lines), a_lines)


def mixed(every: int = 1) -> list[Pair]:
    """Fifty planted faults, spread over the scripts, each beside one of the mixes of rewrites; or one of so many."""
    faults, pairs = _faults(), []
    for number in range(0, 50, every):
        pair = faults[number * len(faults) // 50]()
        mix = rewrites.MIXES[number % len(rewrites.MIXES)]
        name = f"mixed/{pair.name.partition('/')[2]}+{'+'.join(mix)}"
        pairs.append(_pair(name, pair.script, pair.args, pair.a[pair.script], pair.b[pair.script], mix))
    return pairs


def same() -> list[Pair]:
    """Each mix of rewrites alone."""
    scripts = ("train_gpt.py", "train_cnn.py", "train_lstm.py", "train_accum.py")
    pairs = []
    for number, mix in enumerate(rewrites.MIXES):
        script = scripts[number % len(scripts)]
        text = rewrites.planted((FIXTURES / script).read_text(encoding="utf-8"), "none")
        pairs.append(_pair(f"same/{script}+{'+'.join(mix)}", script, ("--steps", "3"), text, text, mix))
    return pairs


def own() -> list[Pair]:
    """Small scripts of `fixtures/refactorings/pairs.py`."""
    import pairs as written

    made = []
    for name, (a, b, planted) in written.PAIRS.items():
        lines = {(f, n) for f, text in b.items() for n, line in enumerate(text.splitlines(), 1) if planted in line}
        gone = {(f, n) for f, text in a.items() for n, line in enumerate(text.splitlines(), 1) if planted in line}
        made.append(
            Pair(f"own/{name}", written.SCRIPT, (), a, b, frozenset(lines), frozenset(gone if not lines else ()))
        )
    return made


def captured(pair: Pair, side: str, directory: Path, forks: Forks) -> Path:
    """The run of one side, made once; the plain version of a script is shared."""
    files = pair.a if side == "a" else pair.b
    digest = hashlib.sha256(json.dumps([pair.script, pair.args, files]).encode()).hexdigest()[:12]
    home = directory / f"{Path(pair.script).stem}-{digest}"
    with _guard:
        lock = _locks.setdefault(home, threading.Lock())
    with lock:
        _capture(pair, files, home, forks)
    return home / "run"


_guard = threading.Lock()
_locks: dict[Path, threading.Lock] = {}


def _capture(pair: Pair, files: dict[str, str], home: Path, forks: Forks) -> None:
    if not (home / "done").exists():
        home.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(text, encoding="utf-8")
        for folder in ("data", "libraries"):
            if not (home / folder).exists():
                (home / folder).symlink_to(FIXTURES / folder)
        words = (
            "capture",
            "-q",
            "--force",
            *pair.options,
            "-o",
            str(home / "run"),
            str(home / pair.script),
            *pair.args,
        )
        done = forks(*words)
        if done.returncode not in {0, 1}:
            raise RuntimeError(f"{pair.name}: {done.stderr[-400:]}")
        (home / "done").touch()


def answer(pair: Pair, directory: Path, forks: Forks) -> tuple[str, str]:
    """`first`, `later` (with its place) or `not listed`; and what came first."""
    try:
        runs = [str(captured(pair, side, directory, forks)) for side in "ab"]
    except RuntimeError as error:
        return "failed", str(error)
    done = forks("diff", "--format", "json", *runs)
    try:
        document = json.loads(done.stdout)
    except json.JSONDecodeError:
        return "failed", done.stderr[-600:]
    if pair.name.startswith("same/"):
        return ("same" if document["verdict"] == "same" else document["verdict"]), document["sentence"][:160]
    if document["verdict"] == "same":
        return "no divergence", ""
    code = document["code"] or {"changes": []}
    changes = [one for one in code["changes"] if one["likely"]]
    right = [place for place, one in enumerate(changes) if _is_planted(one, pair)]
    said = f"{changes[0]['place']} {(changes[0]['b'] or changes[0]['a'])['text'][:70]!r}" if changes else ""
    said += f" ({document['first']['reason'] if document['first'] else 'ended'})"
    word = "first" if right[:1] == [0] else f"place {right[0] + 1} of {len(changes)}" if right else "not listed"
    return word, said


def _is_planted(change: dict, pair: Pair) -> bool:
    """Whether a listed change is the planted one: its line, where it names one, else its first."""
    file, _, line = change["place"].rpartition(":")
    number = change.get("line") or (int(line) if line.isdigit() else 0)
    lines = pair.b_lines if change["b"] is not None else pair.a_lines
    if (file, number) in lines:
        return True
    texts = pair.b[file].splitlines() if change["b"] is not None and file in pair.b else []
    if texts and any(f == file and texts[n - 1] == texts[number - 1] and abs(n - number) <= 1 for f, n in lines):
        return True  # one of two equal lines
    if pair.a_lines and change["a"] is not None:  # the statement is gone: what was there
        return any(change["a"]["first"] <= n <= change["a"]["last"] for f, n in pair.a_lines if f == file)
    return False


def main() -> int:
    """Print how many are first; the exit status is 0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=["single", "mixed", "same", "own"])
    parser.add_argument("--only", default="*")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, kept and used again")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="also those that are right")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.keep or Path(scratch)
        forks = Forks()
        try:
            for name in options.sets:
                pairs = [pair for pair in globals()[name]() if fnmatch.fnmatch(pair.name, options.only)]
                with ThreadPoolExecutor(options.jobs) as pool:
                    answers = list(pool.map(lambda pair: answer(pair, directory, forks), pairs))
                for pair, (word, said) in zip(pairs, answers, strict=True):
                    if options.verbose or word not in {"first", "same"}:
                        print(f"  {pair.name}: {word}: {said}", flush=True)
                        wanted = sorted(pair.b_lines)[:3] or sorted(pair.a_lines)[:3]
                        print(f"      planted {wanted}")
                right = sum(word in {"first", "same"} for word, _ in answers)
                failed += sum(word == "failed" for word, _ in answers)
                print(f"{name}: {right} of {len(pairs)}", flush=True)
        finally:
            forks.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

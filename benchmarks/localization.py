"""Count how many planted faults are named at exactly the right place.

A comparison that points somewhere near the fault still costs an evening, so a case counts only when step, phase,
kind, name and role of the first divergence are right and its sentence says what a reader needs. Every pair of
`fixtures/cases.yaml` is captured and compared through the command line, as a user would; a capture that several
pairs share is made once.

    python benchmarks/localization.py [--only PATTERN] [--jobs N] [--keep DIRECTORY]

With `--matrix`, every fault again under every configuration of `configurations.py`, and each claim of each answer held
against the records (`claims.py`).
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml
from forks import Forks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
MATCHED = ("step", "phase", "kind", "fqn", "role", "path", "call", "reason")
"""What of the first divergence must be exactly as expected, as far as the case says it."""


@dataclass(frozen=True)
class Side:
    """One run of a pair: the script's own arguments, what its environment adds, and options of the capture."""

    script: str
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A pair of runs and what must be said of it; an empty `expect` means that the two are the same."""

    name: str
    a: Side
    b: Side
    expect: dict[str, Any] = field(default_factory=dict)
    in_slice: bool = False


def load_cases(path: Path = FIXTURES / "cases.yaml") -> list[Case]:
    """Read the pairs, those that differ before those that are the same."""
    listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    cases = [_case(entry["name"], entry) for entry in listed["pairs"]]
    for entry in listed["same"]:
        extra = shlex.split(entry.get("b", {}).get("args", ""))
        words = [entry["script"].removesuffix(".py"), *shlex.split(entry["args"]), *(["and", *extra] if extra else [])]
        cases.append(_case("same-" + "-".join(word.lstrip("-") for word in words), entry))
    return cases


def load_operator_cases(path: Path = FIXTURES / "cases_ops.yaml") -> list[Case]:
    """Read the changed operators: `line` is the text of the script's line that must be named."""
    script = "ops/train_ops.py"
    options = ("--level", "op")
    plain = Side(script, ("--steps", "1"), options=options)
    cases = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["pairs"]:
        faulty = Side(script, ("--steps", "1", "--fault", entry["name"]), options=options)
        cases.append(Case(f"op-{entry['name']}", plain, faulty, {**entry["expect"], "line": entry["line"]}))
    return cases


def load_field_cases(path: Path = FIXTURES / "field" / "cases.yaml") -> list[Case]:
    """Read the errors of the field."""
    cases = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["cases"]:
        plain = Side(f"field/{entry['script']}", tuple(shlex.split(entry.get("args", ""))))
        faulty = replace(plain, args=(*plain.args, "--bug", entry["bug"]))
        name = f"{entry['script'].removesuffix('.py')}-{entry['bug']}"
        cases.append(Case(name, plain, faulty, entry["expect"], bool(entry.get("slice"))))
    return cases


def _case(name: str, entry: dict[str, Any]) -> Case:
    common = shlex.split(entry["args"])
    sides = []
    for letter in "ab":
        change = entry.get(letter, {})
        env = {name: value.format(fixtures=FIXTURES) for name, value in change.get("env", {}).items()}
        args = (*common, *shlex.split(change.get("args", "")))
        sides.append(Side(entry["script"], args, tuple(sorted(env.items()))))
    return Case(name, sides[0], sides[1], entry.get("expect", {}), bool(entry.get("slice")))


Answer = subprocess.CompletedProcess[str]


class Command(Protocol):
    """A way to run the command line."""

    def __call__(self, *arguments: str, env: Sequence[tuple[str, str]] = ()) -> Answer:
        """Run `introspect ARGUMENTS...` with `env` added to the environment."""


def introspect(*arguments: str, env: Sequence[tuple[str, str]] = ()) -> Answer:
    """Run the command line in a process of its own, on one thread, so that many fit side by side."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(env)}
    command = [sys.executable, "-m", "introspect_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)


class Captures:
    """Runs of the fixtures under one directory, each captured when it is first asked for."""

    def __init__(self, directory: Path, run: Command = introspect) -> None:
        self.directory = directory
        self.run = run
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def path(self, side: Side, *, again: bool = False) -> Path:
        """The run of this side; `again` is a second capture of the same command."""
        digest = hashlib.sha256(repr((side, again)).encode()).hexdigest()[:12]
        return self.made(f"{Path(side.script).stem}-{digest}", lambda target: self._capture(side, target))

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """What has this name, made when it is first asked for."""
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        target = self.directory / name
        finished = self.directory / f"{name}.done"
        with lock:
            if not finished.exists():
                make(target)
                finished.touch()
        return target

    def _capture(self, side: Side, target: Path) -> None:
        before = ["capture", "-q", "--force", *side.options, "-o", str(target)]
        done = self.run(*before, str(FIXTURES / side.script), *side.args, env=side.env)
        if done.returncode != 0:
            command = shlex.join([side.script, *side.args])
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-300:].strip()}")

    def pair(self, case: Case) -> tuple[Path, Path]:
        """Both runs of a case."""
        return self.path(case.a), self.path(case.b, again=case.a == case.b)


def compare(a: Path, b: Path, run: Command = introspect) -> dict[str, Any]:
    """The answer of `diff` as data, with its exit status added."""
    done = run("diff", "--format", "json", str(a), str(b))
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise RuntimeError(f"diff {a} {b} ended with {done.returncode}: {done.stderr[-300:].strip()}") from None
    return {**answer, "status": done.returncode}


def wrong(case: Case, answer: dict[str, Any]) -> list[str]:
    """What of the answer is not as the case expects; empty when all is."""
    if not case.expect:
        right = answer["verdict"] == "same" and answer["status"] == 0
        return [] if right else [f"{answer['verdict']} (exit {answer['status']}): {answer['sentence']}"]
    first = answer["first"]
    if answer["verdict"] != "diverged" or answer["status"] != 1 or first is None:
        return [f"{answer['verdict']} (exit {answer['status']}): {answer['sentence']}"]
    expect = case.expect
    found = [
        f"{key} is {first[key]}, not {expect[key]}" for key in MATCHED if key in expect and first[key] != expect[key]
    ]
    if expect.get("word", "").lower() not in answer["sentence"].lower():
        found.append(f"no {expect['word']!r} in {answer['sentence']!r}")
    told = " ".join([answer["sentence"], *answer["evidence"]]).lower()
    found += [f"no {word!r} in {told!r}" for word in expect.get("words", ()) if word.lower() not in told]
    found += [f"{word!r} in {told!r}" for word in expect.get("never", ()) if word.lower() in told]
    if "line" in expect and (line := _line(case.a.script, first.get("source", ""))) != expect["line"]:
        found.append(f"the line is {line!r}, not {expect['line']!r}")
    return found


def _line(script: str, source: str) -> str:
    """The text of the line that a `file:line` names; "" for none."""
    number = source.rpartition(":")[2]
    lines = (FIXTURES / script).read_text(encoding="utf-8").splitlines()
    return lines[int(number) - 1].strip() if number else ""


def judge(case: Case, captures: Captures, run: Command = introspect) -> list[str]:
    """Capture, compare and check one case; a failure to do so is one of the things wrong."""
    try:
        return wrong(case, compare(*captures.pair(case), run))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [str(error)]


def main() -> int:
    """Print the table; the exit status is 0 when every case is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of the cases to run, as a glob")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, kept and used again")
    parser.add_argument("--warm", action="store_true", help="fork captures from a process that has torch imported")
    parser.add_argument(
        "--matrix", action="store_true", help="every fault under every configuration, each claim checked"
    )
    parser.add_argument("--configurations", default="*", help="names of the configurations to try, as a glob")
    options = parser.parse_args()
    everything = [*load_cases(), *load_operator_cases(), *load_field_cases()]
    cases = [case for case in everything if fnmatch.fnmatch(case.name, options.only)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        directory = options.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        run = Forks() if options.warm else introspect
        captures = Captures(directory, run)
        if options.matrix:
            return _matrix(cases, options, captures)
        verdicts = []
        for case, found in zip(cases, pool.map(lambda case: judge(case, captures, run), cases), strict=True):
            verdicts.append((case, not found))
            if found:
                print(f"{case.name:44} {'; '.join(found)}", flush=True)
    print(table(verdicts))
    return int(not all(right for _, right in verdicts))


def _matrix(cases: Sequence[Case], options: argparse.Namespace, captures: Captures) -> int:
    from configurations import CONFIGURATIONS
    from matrix import chosen, print_matrix  # which imports this file

    wanted = [one for one in CONFIGURATIONS if fnmatch.fnmatch(one.name, options.configurations)]
    return print_matrix(chosen(cases, wanted), captures, options.jobs)


def table(verdicts: Sequence[tuple[Case, bool]]) -> str:
    """How many of each script's cases are right, and of all."""
    lines = [f"{'script':24} {'planted faults':>14} {'right':>6} {'equal pairs':>12} {'false alarms':>13}"]
    for script in [*dict.fromkeys(case.a.script for case, _ in verdicts), "all"]:
        own = [(case, right) for case, right in verdicts if script in (case.a.script, "all")]
        planted = [right for case, right in own if case.expect]
        same = [right for case, right in own if not case.expect]
        alarms = len(same) - sum(same)
        lines.append(f"{script:24} {len(planted):14} {sum(planted):6} {len(same):12} {alarms:13}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

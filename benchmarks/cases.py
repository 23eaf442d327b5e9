"""The planted faults: pairs of runs, how they are captured, and what must be said of them.

Every pair of `fixtures/cases.yaml` is captured and compared through the command line, as a user would; a capture that
several pairs share is made once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

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


@functools.cache
def _read(path: Path) -> Any:
    """A file of cases, by the parser in C where there is one, which takes a tenth of the time."""
    return yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def load_cases(path: Path = FIXTURES / "cases.yaml") -> list[Case]:
    """Read the pairs, those that differ before those that are the same."""
    listed = _read(path)
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
    for entry in _read(path)["pairs"]:
        faulty = Side(script, ("--steps", "1", "--fault", entry["name"]), options=options)
        cases.append(Case(f"op-{entry['name']}", plain, faulty, {**entry["expect"], "line": entry["line"]}))
    return cases


def load_field_cases(path: Path = FIXTURES / "field" / "cases.yaml") -> list[Case]:
    """Read the errors of the field."""
    cases = []
    for entry in _read(path)["cases"]:
        args, options = (tuple(shlex.split(entry.get(name, ""))) for name in ("args", "options"))
        plain = Side(f"field/{entry['script']}", args, options=options)
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


def introspect(*arguments: str, env: Sequence[tuple[str, str]] = (), cwd: str | Path = ".") -> Answer:
    """Run the command line in a process, on one thread, so that many fit side by side."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(env)}
    command = [sys.executable, "-m", "introspect_cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment, check=False, timeout=300)


class Captures:
    """Runs of the fixtures under one directory, each captured when it is first asked for."""

    def __init__(self, directory: Path, run: Command = introspect) -> None:
        self.directory = directory
        self.run = run

    def path(self, side: Side, *, again: bool = False) -> Path:
        """The run of this side; `again` is a second capture of the same command."""
        digest = hashlib.sha256(repr((side, again)).encode()).hexdigest()[:12]
        return self.made(f"{Path(side.script).stem}-{digest}", lambda target: self._capture(side, target))

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """What has this name, made when it is first asked for."""
        target = self.directory / name
        finished = self.directory / f"{name}.done"
        if not finished.exists():
            with (self.directory / f"{name}.lock").open("w") as lock:  # of other processes, and of threads of this one
                fcntl.flock(lock, fcntl.LOCK_EX)
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
    problems = [
        f"{key} is {first[key]}, not {expect[key]}" for key in MATCHED if key in expect and first[key] != expect[key]
    ]
    if expect.get("word", "").lower() not in answer["sentence"].lower():
        problems.append(f"no {expect['word']!r} in {answer['sentence']!r}")
    text = " ".join([answer["sentence"], *answer["evidence"]]).lower()
    problems += [f"no {word!r} in {text!r}" for word in expect.get("words", ()) if word.lower() not in text]
    problems += [f"{word!r} in {text!r}" for word in expect.get("never", ()) if word.lower() in text]
    if "line" in expect and (line := _line(case.a.script, first.get("source", ""))) != expect["line"]:
        problems.append(f"the line is {line!r}, not {expect['line']!r}")
    return problems


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

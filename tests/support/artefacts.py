"""Runs that tests read, made once: the first test that asks has them made, all others, and later suites, read them.

`kept_runs` says what a run rests on. What makes it is part of that: its source, and what that names, functions of the
tests and values alike. What a test alters it copies first. They lie under `~/.cache`, or where
`INTROSPECT_TEST_RUNS` says.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import cases
import decisions
import kept_runs
from kept_runs import kept, key_of
from launches import SCRIPT, finish, lacks, launch, needs

REPOSITORY = Path(__file__).parents[2]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ROOT = Path(
    os.environ.get("INTROSPECT_TEST_RUNS")
    or _CACHE / "introspect-tests" / hashlib.sha256(str(REPOSITORY).encode()).hexdigest()[:12]
)
"""Outside of the repository, which would be the project of each script; runs name their scripts by absolute paths."""
LEAN = ("--no-packages", "--no-env", "--no-source")
OURS = tuple(str(REPOSITORY / folder) + os.sep for folder in ("tests", "benchmarks", "fixtures"))


def artefact(name, make, *parts):
    """The folder that `make` filled when it was first asked for; `parts` is what it rests on beside all it names."""
    return kept(ROOT, name, key_of(*described(make), *parts), make)


def described(value, seen=None):
    """What identifies a value from one process to the next: of functions the source, and all that it names."""
    seen = set() if seen is None else seen
    if isinstance(value, Path):
        yield value.name
        if str(value).startswith(OURS):  # a script may import what lies beside it
            yield value if value.is_dir() or value.parent == REPOSITORY / "fixtures" else value.parent
    elif isinstance(value, str | bytes | int | float | type(None)):
        yield value
    elif isinstance(value, dict):
        for item in value.items():
            yield from described(item, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
            yield from described(item, seen)
    elif isinstance(value, partial):
        yield from described((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.FunctionType | type):
        if not _is_ours(value) or value in seen:
            yield value.__qualname__
            return
        seen.add(value)
        yield _source(value.__code__ if isinstance(value, types.FunctionType) else value)
        for function in [value] if isinstance(value, types.FunctionType) else vars(value).values():
            if isinstance(function, types.FunctionType):
                yield from described([function.__globals__.get(n) for n in sorted(_names(function.__code__))], seen)
                yield from described([cell.cell_contents for cell in function.__closure__ or ()], seen)
                yield from described(function.__defaults__ or (), seen)
    elif isinstance(value, types.ModuleType):
        yield value.__name__
    else:
        yield re.sub(r"0x[0-9a-f]+", "", repr(value))


_REDUCING = REPOSITORY / "benchmarks" / "configurations.py"
_source = functools.cache(inspect.getsource)


def _is_ours(value):
    code = getattr(value, "__code__", None)
    home = code.co_filename if code is not None else getattr(inspect.getmodule(value), "__file__", None)
    return str(home).startswith(OURS)


def _names(code):
    """The names that a function looks up, those inside it included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def captures(run):
    """The runs of `fixtures/*.yaml`, for as long as neither what records nor a fixture changes."""
    directory = ROOT / f"cases-{key_of(cases.FIXTURES, _REDUCING)}"
    directory.mkdir(parents=True, exist_ok=True)
    os.utime(directory)
    return cases.Captures(directory, run)


DECISIONS = ROOT / "decisions"
"""Where `benchmarks/decisions.py` makes the runs that tests ask."""


def decided(group, *names):
    """The directories of runs of a group of `fixtures/decisions/corpora.yaml`, which decisions are asked of, too.

    Skips a test of a layout that this torch is too old for.
    """
    needs(*names, *(name.partition("/")[2] for name in names))
    only = [f"check {group} {name}" for name in names]
    folder, runs = DECISIONS / kept_runs.recorder_key(), [_first_runs()[question] for question in only]
    if not decisions.has_runs(folder, runs):
        words = [word for glob in only for word in ("--only", glob)]
        subprocess.run([sys.executable, decisions.__file__, "make", DECISIONS, *words], check=True, capture_output=True)
    return [folder / run for run in runs]


@functools.cache
def _first_runs():
    """The name of the run, or the first one, of each question."""
    return {question.name: question.runs[0] for question in decisions.planned()[0]}


def run_of(forks, script, *words, options=()):
    """The run of a fixture with these words, captured with these options; whatever else it writes lies beside it."""

    def make(place):
        done = forks("capture", "-q", *map(str, options), "-o", "run", str(script), *map(str, words), cwd=place)
        assert done.returncode == 0, done.stderr

    return artefact("run", make) / "run"


def launched(folder, runs, *, options=(), script=SCRIPT):
    """Put the runs of these launches into a folder, by name, but those that this torch is too old for.

    Args:
        folder: where.
        runs: for each name a number of ranks, and words.
        options: of the captures.
        script: a fixture, or the text of a script.
    """
    for name, (world, *words) in runs.items():

        def make(place, world=world, words=words):
            file = script
            if isinstance(script, str):
                file = place / "train.py"
                file.write_text(script)
            said = finish(launch(place, "run", world, *map(str, words), options=options, script=file))
            assert (place / "run" / "manifest.json").exists(), said
            (place / "said.txt").write_text("".join(said))

        if not lacks(str(*words[:1])):
            (folder / name).symlink_to(artefact("launch", make) / "run")
    return folder

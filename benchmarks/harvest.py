"""What tests ask of runs they made: a plugin of pytest that writes down each command, and what becomes of the list.

    FROZEN_LOG=FILE pytest -p harvest --basetemp=DIRECTORY/tests tests/commands/test_diff_command.py ...

Tests make many runs that no list of cases has: several ranks, ports, refactorings, resumed and interrupted ones. Each
command line that a test gives is written down with its directory, and so is each call of the comparison in process,
as the command line that asks the same. What still finds its runs after the tests can be asked again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LOG = "FROZEN_LOG"
VERBS = frozenset({"diff", "check", "show", "report", "runs", "verify"})
"""The verbs whose answer can be asked again: they read, and write but one file."""

_NEVER = frozenset({"--zoom", "label", "prune"})
_ENVIRONMENT = re.compile(r"COLUMNS|LINES|NO_COLOR|FORCE_COLOR|CLICOLOR.*|TERM|LANG|LC_.*|INTROSPECT_.*")
_PACKED = ".introspect.zip"


def _log(words: Sequence[str], cwd: str | Path, env: dict[str, str]) -> None:
    if not words or words[0] not in VERBS or _NEVER.intersection(words):
        return
    kept = {name: value for name, value in env.items() if _ENVIRONMENT.fullmatch(name)}
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    line = json.dumps({"test": test, "words": list(words), "cwd": str(Path(cwd).resolve()), "env": kept})
    with Path(os.environ[LOG]).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def pytest_configure() -> None:
    """Write down what is asked from now on; before any test has been imported."""
    import forks

    from introspect_cli.compare import diff
    from introspect_cli.health import check

    before = dict(os.environ)

    def changed(env: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in env.items() if before.get(name) != value}

    start, popen, compare, checked = forks.Forks.start, subprocess.Popen.__init__, diff.compare_runs, check.check

    def started(self: Any, argv: Sequence[str], env: dict[str, str], cwd: str | Path, *streams: int) -> Any:
        if list(argv[:2]) == ["-m", "introspect_cli"]:
            _log([str(word) for word in argv[2:]], cwd, changed({**os.environ, **env}))
        return start(self, argv, env, cwd, *streams)

    def opened(self: Any, args: Any, *more: Any, **named: Any) -> None:
        words = [] if isinstance(args, (str, bytes)) else [str(word) for word in args]
        if words[1:3] == ["-m", "introspect_cli"]:
            _log(words[3:], named.get("cwd") or ".", changed(dict(named.get("env") or os.environ)))
        popen(self, args, *more, **named)

    def compared(a: Any, b: Any, options: Any, noise: Sequence[Any] = ()) -> Any:
        words = words_of(options)
        if words is not None:
            noises = [word for run in noise for word in ("--noise", str(run.path))]
            for form in (["--format", "json"], ["-v"]):
                _log(["diff", *form, *words, *noises, str(a.path), str(b.path)], ".", {})
        return compare(a, b, options, noise)

    def looked_at(run: Any, *more: Any, **named: Any) -> Any:
        _log(["check", "--format", "json", str(run.path)], ".", {})
        return checked(run, *more, **named)

    forks.Forks.start = started  # type: ignore[method-assign]
    subprocess.Popen.__init__ = opened  # type: ignore[method-assign]
    diff.compare_runs = compared
    check.check = looked_at


def words_of(options: Any) -> list[str] | None:
    """Options of a comparison as the command line says them; None where it cannot."""
    words: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value == default or field.name in {"whole_step", "later"}:
            continue
        say: Callable[[Any], list[str]] | None = _SAID.get(field.name)
        if say is None:
            return None
        words += say(value)
    return words


_SAID: dict[str, Any] = {
    "steps": lambda value: ["--steps", str(value)],
    "kinds": lambda value: ["--kinds", ",".join(sorted(kind.value for kind in value))],
    "modules": lambda value: [word for glob in value for word in ("--modules", glob)],
    "ranks": lambda value: ["--ranks", ",".join(map(str, value))],
    "rename": lambda value: [word for old, new in value for word in ("--rename", f"{old}={new}")],
    "offset": lambda value: ["--offset", str(value)],
    "rtol": lambda value: ["--rtol", str(value)],
    "atol": lambda value: ["--atol", str(value)],
    "limit": lambda value: ["--all"] if value is None else ["--limit", str(value)],
    "want_map": lambda value: ["--map"] if value else [],
    "strict": lambda _: ["--strict"],
    "by_value": lambda _: ["--match", "name"],
}


def is_run(path: Path) -> bool:
    """Whether there is a run, as a directory or in a pack."""
    return (path / "manifest.yaml").is_file() or (path.is_file() and path.name.endswith((_PACKED, ".zip")))


def commands(
    log: Path, directory: Path, output: str
) -> Iterator[tuple[str, str, tuple[str, ...], dict[str, str], str]]:
    """What the log says that can be asked again: file and name of the test, words, environment, and where.

    Args:
        log: what the tests asked.
        directory: what the runs are below; others are copied to below it.
        output: stands for the file that a verb is told to write.
    """
    for line in log.read_text(encoding="utf-8").splitlines():
        asked = json.loads(line)
        cwd = Path(asked["cwd"])
        inside = cwd.is_relative_to(directory) and cwd.is_dir()
        place = cwd if inside else directory
        words, runs = [], 0
        for before, word in zip(["", *asked["words"]], asked["words"], strict=False):
            path = cwd / word
            if before in {"-o", "--output"}:
                words.append(f"{output}{path.suffix}")
            elif word and not word.startswith("-") and os.sep not in word and (not inside or not is_run(path)):
                words.append(word)
                runs += is_run(path)
            elif word and not word.startswith("-") and path.exists() and len(path.parts) > 2:
                runs += is_run(path)
                words.append(os.path.relpath(_kept(path.resolve(), directory), place))
            else:
                words.append(word)
        if runs or asked["words"][0] == "runs":
            file, _, test = asked["test"].partition("::")
            yield Path(file).stem, test, tuple(words), asked["env"], os.path.relpath(place, directory)


def _kept(path: Path, directory: Path) -> Path:
    """The same below the directory, where it would be lost otherwise."""
    if path.is_relative_to(directory):
        return path
    target = directory / "outside" / path.relative_to(path.anchor)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, target)
    return target

"""How a recorded run can be run again: the command line, the files, the interpreter, the variables it had.

A manifest tells what ran and where; the files it ran may be others by now: see `place`. Secrets were never recorded, so
a variable that holds one is taken as it is now.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.settings.settings import ENV_NOISE
from introspect_cli.rerun.place import COMMITS, TREE
from introspect_cli.store.files import REDACTED, RUNS
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from introspect_cli.rerun.place import Place
    from introspect_cli.store.run import Run


@dataclass(frozen=True)
class Recipe:
    """All that is needed to run a recorded command again.

    Attributes:
        options: capture options that change what the script computes, by name.
        started: the script, or `-m` and a module; empty where a launcher is started.
        arguments: the words that follow.
        directory: where it ran.
        environment: variables that are to be set as they were; None removes one.
        python: the interpreter; "" for the one that runs this.
        script: the script, as it was named; "" for a module.
        sources: hash of each source file by its name in the project; empty where none were recorded.
        notes: what is not as it was.
        problem: why it cannot be run again; "" where it can.
    """

    options: Mapping[str, Any]
    started: tuple[str, ...]
    arguments: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str | None] = field(default_factory=dict)
    python: str = ""
    script: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problem: str = ""

    @property
    def search_path(self) -> str:
        """PYTHONPATH as it is to be."""
        return self.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH")) or ""

    def words_at(self, place: Place, *more: str) -> tuple[str, ...]:
        """Capture options and `more` of them, script and arguments, with rebuilt paths in place of absolute ones."""
        given = ((name, value) for name, value in self.options.items() if value is not None and value is not False)
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given]
        words += ["--no-eval"] if self.options.get("eval") is False else []
        return (*words, *more, *map(place.rebuilt_word, (*self.started, *self.arguments)))


def recipe_of(run: Run) -> Recipe:
    """The recipe to run a recorded command again; for a run of several processes, that of its launcher.

    It cannot be run again where no command line was recorded (or of a launch, not the launcher's), it holds redacted
    values, or its directory does not exist.

    Raises:
        StoreError: its settings are damaged.
    """
    command = run.settings.document("command")
    script, module, words = command.get("script"), command.get("module"), command.get("arguments")
    started, directory, problems = [str(script)] if script else ["-m", str(module)], command.get("directory"), []
    if not (script or module) or script == "-c" or not isinstance(words, list) or not isinstance(directory, str):
        problems.append("no command line was recorded that could be run again")
    if run.world_size > 1 or run.manifests:
        launcher = command.get("launcher")
        if isinstance(launcher, dict) and isinstance(launcher.get("arguments"), list):
            started, words, directory = [], launcher["arguments"], launcher.get("directory")
        else:
            processes = f"its {count(run.world_size, 'process', 'processes')} were started by a launcher"
            remedy = "(`introspect capture torchrun ...` records it)"
            problems.append(f"{processes}, whose command line was not recorded {remedy}")
    words, directory = [str(word) for word in words or ()], str(directory or ".")
    if any(REDACTED in word for word in words):
        problems.append("its command line holds values that were redacted")
    moved = _users_paths(directory)
    started, words, directory = [*map(moved, started)], [*map(moved, words)], moved(directory)
    if not Path(directory).is_dir():
        problems.append(f"its directory {directory} does not exist")
    environment, notes = _variables(run, moved)
    python = str(command.get("python") or "")
    if python and not Path(python).is_file():
        notes.append(f"its interpreter {python} does not exist: this one is used")
        python = ""
    sources, options = run.settings.document("sources"), run.manifest.get("options") or {}
    return Recipe(
        options={name: options.get(name) for name in ("seed", "perturb", "deterministic", "compile", "eval")},
        started=tuple(started),
        arguments=tuple(words),
        directory=Path(directory),
        environment=environment,
        python=python,
        script=moved(str(script or "")),
        sources={name: text for name, text in sources.items() if isinstance(name, str) and isinstance(text, str)},
        notes=tuple(notes),
        problem=next(iter(problems), ""),
    )


def _users_paths(directory: str) -> Callable[[str], str]:
    """A function that replaces paths in the place in which a revision ran by those of the user's project in a text.

    It returns texts unchanged where `directory` (where the run ran) lies in no such place or still exists.
    """
    place = next((path for path in Path(directory).parents if path.parts[-3:] == (RUNS, COMMITS, TREE)), None)
    if place is None or Path(directory).is_dir():
        return str
    return lambda text: text.replace(str(place), "")


def _variables(run: Run, moved: Callable[[str], str]) -> tuple[dict[str, str | None], list[str]]:
    """Environment variables that differ now, by name, with their recorded value (None: remove); and notes.

    Noise (`ENV_NOISE`) and redacted values are left out; a note names redacted ones that are not set now. None are
    changed, with a note, where no environment was recorded. `moved` is the function of `_users_paths`.
    """
    recorded = run.settings.get("environment")
    if not isinstance(recorded, dict):
        return {}, ["its environment variables were not recorded: the current ones are used"]
    known = {name: moved(value) for name, value in recorded.items() if isinstance(value, str)}
    secret = [name for name, value in known.items() if REDACTED in value and not ENV_NOISE.match(name)]
    now = {name: clean(value) for name, value in os.environ.items()}
    changed: dict[str, str | None] = {name: value for name, value in known.items() if now.get(name) != value}
    changed |= dict.fromkeys(now.keys() - recorded.keys())
    changed = {name: value for name, value in changed.items() if not ENV_NOISE.match(name) and name not in secret}
    unset = [name for name in secret if name not in now]
    return changed, [f"{', '.join(unset)} was not recorded, being secret, and is not set now"] if unset else []

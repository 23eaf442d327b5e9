"""How a recorded run can be run again: the command line, the files, the interpreter, the variables it had.

A manifest tells what ran and where; the files it ran may be others by now. The run's own hashes say whether they are.
Where they are, and the commit they came from is known, a work tree of that commit stands in for them; what neither has
is said, never passed over. Secrets were never recorded, so a variable that holds one is taken as it is now.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.compare.settings.settings import ENV_NOISE
from introspect_cli.compare.terms.words import some
from introspect_cli.errors import UsageError
from introspect_cli.rerun.places.place import COMMITS, PLACE, Place, path_of_the_users
from introspect_cli.rerun.places.worktree import Repository, link, work_tree
from introspect_cli.store.files.folders import REDACTED, RUNS
from introspect_cli.sums import source_digest
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from introspect_cli.store.read.run import Run


class UnrepeatableError(UsageError):
    """A run that cannot be run again; the sentence says why."""


@dataclass(frozen=True)
class Recipe:
    """What it takes to run a recorded command again.

    Attributes:
        options: capture options that change what the script computes.
        started: the script, or `-m` and a module; empty where a launcher is started.
        arguments: the words that follow.
        directory: where it ran.
        environment: variables that are to be set as they were; None removes one.
        python: the interpreter; "" for the one that runs this.
        script: the script, as it was named; "" for a module.
        sources: hash of each source file by its name in the project; empty where none were recorded.
        commit: the commit its files came from; "" where that was not recorded.
        notes: what is not as it was.
    """

    options: tuple[str, ...]
    started: tuple[str, ...]
    arguments: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str | None] = field(default_factory=dict)
    python: str = ""
    script: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Capture options, then the script and its arguments."""
        return (*self.options, *self.started, *self.arguments)

    def words_at(self, place: Place) -> tuple[str, ...]:
        """The words at a place: paths of python files moved, unless they follow the directory there."""
        words, here = [], self.directory.resolve()
        for word in self.words:
            follows = not word.startswith(os.sep) and place.moved(here) != here
            moves = word.endswith(".py") and not follows
            path = (self.directory / word).resolve()
            words.append(str(place.moved(path)) if moves and place.moved(path) != path else word)
        return tuple(words)


def recipe_of(run: Run) -> Recipe:
    """How a run can be run again.

    Raises:
        UnrepeatableError: it cannot be; the sentence says why.
        StoreError: its settings are damaged.
    """
    command = run.settings.document("command")
    script, module, words = command.get("script"), command.get("module"), command.get("arguments")
    directory = command.get("directory")
    if not (script or module) or script == "-c" or not isinstance(words, list) or not isinstance(directory, str):
        raise UnrepeatableError("no command line was recorded that could be run again")
    started = [str(script)] if script else ["-m", str(module)]
    words = [str(word) for word in words]
    if run.world_size > 1 or run.manifests:
        launcher = command.get("launcher")
        if not isinstance(launcher, dict) or not isinstance(launcher.get("arguments"), list):
            raise UnrepeatableError(
                f"its {count(run.world_size, 'process', 'processes')} were started by a launcher, whose command line "
                "was not recorded (`introspect capture torchrun ...` records it)"
            )
        started, words = [], [str(word) for word in launcher["arguments"]]
        directory = str(launcher.get("directory"))
    if any(REDACTED in word for word in words):
        raise UnrepeatableError("its command line holds values that were redacted")
    moved = _from_revisions(directory)
    started, words, directory = [*map(moved, started)], [*map(moved, words)], moved(directory)
    if not Path(directory).is_dir():
        raise UnrepeatableError(f"its directory {directory} does not exist")
    environment, notes = _variables(run, moved)
    python = str(command.get("python") or "")
    if python == sys.executable or not python:
        python = ""
    elif not _has_us(python, directory, environment):
        notes.append(f"its interpreter {python} does not exist or has no introspect-cli: this one is used")
        python = ""
    sources, git = run.settings.document("sources"), run.settings.document("git")
    return Recipe(
        options=tuple(_options(run)),
        started=tuple(started),
        arguments=tuple(words),
        directory=Path(directory),
        environment=environment,
        python=python,
        script=moved(str(script or "")),
        sources={name: text for name, text in sources.items() if isinstance(name, str) and isinstance(text, str)},
        commit=str(git.get("commit") or ""),
        notes=tuple(notes),
    )


def _options(run: Run) -> list[str]:
    """Capture options of the run that change what the script computes, or which steps it has."""
    options = run.manifest.get("options") or {}
    words: list[str] = []
    if isinstance(options.get("seed"), int):
        words += ["--seed", str(options["seed"])]
    if isinstance(options.get("perturb"), int):
        words += ["--perturb", str(options["perturb"])]
    if options.get("deterministic") is True:
        words.append("--deterministic")
    if options.get("compile") in ("keep", "eager"):
        words += ["--compile", options["compile"]]
    if isinstance(options.get("eval"), bool):
        words.append("--eval" if options["eval"] else "--no-eval")
    return words


def _from_revisions(directory: str) -> Callable[[str], str]:
    """What leads from the place in which revisions ran (`diff REV REV`), and which is gone, to the user's project."""
    place = next((path for path in Path(directory).parents if path.parts[-3:] == (RUNS, COMMITS, PLACE)), None)
    repository = None if place is None else Repository.around(place.parents[2])
    if place is None or repository is None or Path(directory).is_dir():
        return str
    users = str(path_of_the_users(place, place, repository.root)).rstrip(os.sep)
    return lambda text: text.replace(str(place), users)


def _variables(run: Run, moved: Callable[[str], str]) -> tuple[dict[str, str | None], list[str]]:
    """Variables that have another value now than they had, and what cannot be as it was."""
    recorded = run.settings.get("environment")
    if not isinstance(recorded, dict):
        return {}, ["its environment variables were not recorded: the current ones are used"]
    changed: dict[str, str | None] = {}
    secret = []
    for name, value in recorded.items():
        if not isinstance(name, str) or not isinstance(value, str) or ENV_NOISE.match(name):
            continue
        if REDACTED in value:
            if name not in os.environ:
                secret.append(name)
        elif clean(os.environ.get(name, "\0")) != moved(value):
            changed[name] = moved(value)
    changed |= {name: None for name in os.environ if name not in recorded and not ENV_NOISE.match(name)}
    notes = [f"{', '.join(secret)} was not recorded, being secret, and is not set now"] if secret else []
    return changed, notes


def _has_us(python: str, directory: str, environment: Mapping[str, str | None]) -> bool:
    """Whether an interpreter is there and finds this package."""
    variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [python, "-c", "import introspect_cli.cli"]
        answer = subprocess.run(  # noqa: S603 - the interpreter that the user's own run had
            asked, cwd=directory, env=variables, capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL
        )
        return answer.returncode == 0
    return False


@contextlib.contextmanager
def placed(recipe: Recipe, tree: Path, links: Sequence[str] = ()) -> Iterator[Place]:
    """A place to run a recipe: where it ran, if its files are as they were; else a work tree of its commit.

    Args:
        recipe: what is to run.
        tree: where a work tree may be made; it is removed afterwards.
        links: paths outside of git (data, checkpoints) that a work tree needs, relative to the directory.

    Raises:
        UsageError: no such path to link.
    """
    start = _start(recipe)
    repository = Repository.around(start)
    root = repository.root if repository is not None else start
    changed = _changed_files(recipe, root)

    def where_it_ran(clause: str) -> Place:
        return Place(root, recipe.directory, note=f"where it ran, {clause}")

    if recipe.sources and not changed:
        yield where_it_ran("its source files unchanged")
        return
    if repository is None or not recipe.commit or not repository.has(recipe.commit):
        why = "its commit is not known here" if repository is not None else "it ran outside of git"
        yield where_it_ran(
            f"although {_changed_words(changed) if changed else 'no source files were recorded'} and {why}"
        )
        return
    if not recipe.sources and repository.ask("rev-parse", "HEAD") == recipe.commit:
        yield where_it_ran(f"at its commit {recipe.commit[:10]}")
        return
    with work_tree(repository, tree, recipe.commit) as checked_out:
        inside = recipe.directory.resolve().is_relative_to(root.resolve())
        below = os.path.relpath(recipe.directory.resolve(), root.resolve()) if inside else "."
        directory = checked_out.root / below if inside else recipe.directory
        link(recipe.directory, checked_out.root / below, links)
        left = _changed_files(recipe, checked_out.root)
        if len(left) > len(changed):
            yield where_it_ran(f"although {_changed_words(changed)}")
            return
        note = f"in a work tree of its commit {recipe.commit[:10]}"
        note += f", although {_changed_words(left)}: that was not committed" if left else ""
        yield Place(checked_out.root, directory, {root.resolve(): checked_out.root}, note=note)


def _start(recipe: Recipe) -> Path:
    """The directory of the script, or the one where a module ran: the project lies around it."""
    if not recipe.script:
        return recipe.directory
    return Path(os.path.realpath(recipe.directory / recipe.script)).parent


def _changed_files(recipe: Recipe, root: Path) -> list[str]:
    """Recorded source files of the project that are not there, or hold something else."""
    changed = []
    for name, digest in recipe.sources.items():
        path = root / name
        try:
            data = path.read_bytes()
        except OSError:
            # Files from elsewhere are named by their modules: where they are now is not known.
            if not _is_elsewhere(name, recipe):
                changed.append(name)
            continue
        if source_digest(data) != digest:
            changed.append(name)
    return changed


def _is_elsewhere(name: str, recipe: Recipe) -> bool:
    """Whether a source file lies on the recorded PYTHONPATH and not in the project."""
    paths = recipe.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    return any((Path(path) / name).is_file() for path in paths.split(os.pathsep) if path)


def _changed_words(names: Sequence[str]) -> str:
    return f"{some(names)} {'has' if len(names) == 1 else 'have'} changed since"

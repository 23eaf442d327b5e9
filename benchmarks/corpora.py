"""What is asked of which runs, and how each of them is made: the corpora of `decisions.py`."""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml
from cases import FIXTURES, Case, Side, load_cases, load_field_cases, load_operator_cases
from configurations import CONFIGURATIONS, Configuration, Reduction
from decisions import KEPT, TREE, Question

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forks import Forks


@dataclass(frozen=True)
class Captured:
    """A run of a script under `introspect capture`.

    Attributes:
        side: the script.
        world: how many processes are launched.
        before: a script and its arguments, run first in the directory in which the other one is run then.
        needs: other runs that it is made from.
        world_before: how many processes are launched of that.
    """

    side: Side
    world: int = 1
    before: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    world_before: int = field(default=1, repr=False)

    def make(self, target: Path, _folder: Path, forks: Forks) -> None:
        """Capture it."""
        where = TREE
        if self.before:
            where = target.parent
            started(forks, self.world_before, [str(FIXTURES / self.before[0]), *self.before[1:]], where)
        words = [*self.side.options, "-o", str(target), str(FIXTURES / self.side.script), *self.side.args]
        started(forks, self.world, ["-m", "introspect_cli", "capture", "-q", *words], where, self.side.env)


@dataclass(frozen=True)
class Several:
    """Runs that a script captures by itself below a directory."""

    script: str
    world: int
    names: tuple[str, ...]
    needs: tuple[str, ...] = ()

    def make(self, target: Path, _folder: Path, forks: Forks) -> None:
        """Run the script."""
        target.mkdir()
        started(forks, self.world, [str(FIXTURES / self.script), str(target), *self.names], target)
        missing = [name for name in self.names if not (target / name).exists()]
        if missing:
            raise RuntimeError(f"not there: {missing}")


@dataclass(frozen=True)
class Program:
    """A run of a script that is given as text."""

    text: str
    needs: tuple[str, ...] = ()

    def make(self, target: Path, _folder: Path, forks: Forks) -> None:
        """Write and capture it."""
        (target.parent / "train.py").write_text(self.text, encoding="utf-8")
        words = ["capture", "-q", "--no-packages", "--no-env", "-o", str(target), "train.py"]
        started(forks, 1, ["-m", "introspect_cli", *words], target.parent)


def started(forks: Forks, world: int, argv: list[str], where: Path, env: tuple[tuple[str, str], ...] = ()) -> None:
    """Run python in one process or as ranks that find each other.

    Raises:
        RuntimeError: it failed; of several ranks, torch itself may abort at the exit of one, which says nothing.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    about = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [{**about, "RANK": rank, "LOCAL_RANK": rank} if world > 1 else {} for rank in range(world)]
    with tempfile.TemporaryFile("w+") as said, Path(os.devnull).open() as none:
        streams = none.fileno(), said.fileno(), said.fileno()
        ranks = [
            forks.start(argv, {**dict(env), **{name: str(value) for name, value in more.items()}}, where, *streams)
            for more in each
        ]
        codes = [rank.wait() for rank in ranks]
        said.seek(0)
        if any(codes) and world == 1:
            raise RuntimeError(f"{shlex.join(argv[-4:])} ended with {codes}: {said.read()[-300:].strip()}")


@dataclass(frozen=True)
class Reduced:
    """What a lean capture would have left, made from a full one."""

    reduction: Reduction
    needs: tuple[str, ...] = field(default=())

    def make(self, target: Path, folder: Path, _forks: Forks) -> None:
        """Reduce it."""
        from configurations import reduce

        reduce(folder / self.needs[0], target, self.reduction)


def corpora() -> Iterator[tuple[Question, dict[str, Any]]]:
    """Every question, with how the runs that it names are made."""
    checked: set[str] = set()
    for case in [*load_cases(), *load_operator_cases(), *load_field_cases()]:
        for one in CONFIGURATIONS:
            if _fits(case, one):
                yield from _of_case(case, one, checked)
    yield from _refactorings()
    groups = yaml.safe_load((KEPT / "corpora.yaml").read_text(encoding="utf-8"))
    for name, group in groups.items():
        yield from _of_group(name, group)


def _of_group(title: str, group: dict[str, Any]) -> Iterator[tuple[Question, dict[str, Any]]]:
    """The questions of a group of `corpora.yaml`."""
    script, makers, names = group["script"], {}, {}
    before = tuple(shlex.split(group.get("before", "")))
    for name, told in group.get("runs", {}).items():
        options = (*shlex.split(group.get("options", "")), *shlex.split(told.get("options", "")))
        side = Side(script, tuple(shlex.split(told.get("args", ""))), options=options)
        maker = Captured(side, told.get("world", 1), before, world_before=group.get("world_before", 1))
        names[name] = name_of(script, maker)
        makers[names[name]] = maker
    pairs = [*group.get("diff", []), *_scenes(group)]
    for name, told in group.get("several", {}).items():
        some = Several(script, told["world"], tuple(told["runs"].split()))
        makers[name_of(script, some)] = some
        names |= {f"{name}/{each}": f"{name_of(script, some)}/{each}" for each in some.names}
    for name, run in names.items() if group.get("check", True) else ():
        yield Question(f"check {title} {name}", "check", (), (run,)), makers
    for pair in pairs:
        a, b, *options = pair.split()
        yield Question(f"diff {title} {pair}", "diff", (*options, "--limit", "1"), (names[a], names[b])), makers


def _scenes(group: dict[str, Any]) -> Iterator[str]:
    """Pairs of scenes, whose runs are added to the group: `X | Y` are two variants, `X` is held against the scene."""
    for scene, pairs in group.get("scenes", {}).items():
        file = scene.partition(".")[0]
        several = group.setdefault("several", {}).setdefault(file, {"world": 1, "runs": ""})
        for pair in pairs:
            variants, *options = pair.split(" --")
            names = [_scene(scene, each) for each in (["", variants] if "|" not in variants else variants.split("|"))]
            several["runs"] = " ".join(dict.fromkeys([*several["runs"].split(), *names]))
            yield " ".join([*(f"{file}/{name}" for name in names), *(f"--{option}" for option in options)])


def _scene(scene: str, variant: str) -> str:
    """The name of a run of a scene: arguments after `~`, ways to capture it after `+`."""
    words = variant.split()
    if "." not in scene:
        scene, words = f"{scene}.{words[0] if words else 'plain'}", words[1:]
    return "".join([scene, *(f"~{word}" for word in words if word[0] != "+"), *(w for w in words if w[0] == "+")])


def _refactorings() -> Iterator[tuple[Question, dict[str, Any]]]:
    """Each model with the edits that are its own, and three models with each edit that fits all."""
    models, edits, special = (_module(FIXTURES / "refactorings" / f"{name}.py") for name in _REFACTORINGS)
    every = list(edits.FIRST)
    for sort in ("SAME", "CHANGED"):
        general = getattr(edits, sort)
        named = list(dict.fromkeys(case[1] for case in general))
        taken = {(every[(2 * at + j) % len(every)], name) for at, name in enumerate(named) for j in (0, 3, 6)}
        cases = [case for case in general if case[:2] in taken] + getattr(special, sort)
        for model, name, changes, *_ in cases:
            makers = {}
            for some in ((), changes):
                program = Program(models.program(model, *some) + "\n\ntrain()\n")
                makers[name_of("refactorings", program)] = program
            question = Question(
                f"diff refactorings {sort.lower()} {model}-{name}", "diff", ("--limit", "1"), tuple(makers)
            )
            yield question, makers


_REFACTORINGS = ("models", "edits", "own_edits")


def _module(path: Path) -> Any:
    space = SimpleNamespace()
    sys.path.insert(0, str(path.parent))
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(space))
    finally:
        sys.path.remove(str(path.parent))
    return space


def _fits(case: Case, one: Configuration) -> bool:
    """Whether a full capture of the case can be reduced to the configuration."""
    is_real = one.capture or one.capture_a or one.capture_b or one.scripts
    return not is_real and (not case.a.options or one.a == one.b == Reduction())


def _of_case(case: Case, one: Configuration, checked: set[str]) -> Iterator[tuple[Question, dict[str, Any]]]:
    makers: dict[str, Any] = {}
    names = []
    for letter in "ab":
        side, reduction = getattr(case, letter), getattr(one, letter)
        name = name_of(side.script, side, again=letter == "b" and case.a == case.b)
        makers[name] = Captured(side)
        if reduction != Reduction():
            full, name = name, f"{name}~{_name_of(reduction)}"
            makers[name] = Reduced(reduction, (full,))
        names.append(name)
    yield Question(f"diff {one.name} {case.name}", "diff", (*_words(one.diff), "--limit", "1"), tuple(names)), makers
    for letter, name in zip("ab", names, strict=True):
        if not one.diff and name not in checked:
            checked.add(name)
            yield Question(f"check {one.name} {case.name} {letter}", "check", (), (name,)), makers


def name_of(script: str, made: Any, *, again: bool = False) -> str:
    """The name of a run: another one for other arguments and for another text of the script."""
    about = repr((made, again)).replace(str(FIXTURES), "FIXTURES")
    path = FIXTURES / script
    if path.is_file():
        beside = [path] if isinstance(made, Side) else sorted(path.parent.glob("*.py"))
        about += "".join(each.read_text(encoding="utf-8") for each in beside)
    return f"{path.stem}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"


def _name_of(reduction: Reduction) -> str:
    kinds = "-".join(reduction.record) or "all"
    return kinds if reduction.measured else f"{kinds}-checksums"


def _words(options: dict[str, Any]) -> list[str]:
    """Options of a comparison as the command line says them."""
    words = []
    for name, value in options.items():
        if name == "kinds":
            words += ["--kinds", ",".join(sorted(kind.value for kind in value))]
        elif name == "modules":
            words += [word for glob in value for word in ("--modules", glob)]
        else:
            words += [f"--{name}", str(value)]
    return words

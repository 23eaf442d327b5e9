"""What is asked of which runs, and how each of them is made: the corpora of `decisions.py`."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cases import FIXTURES, Case, Side, load_cases, load_field_cases, load_operator_cases
from configurations import CONFIGURATIONS, Configuration, Reduction
from decisions import Question

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forks import Forks


@dataclass(frozen=True)
class Captured:
    """A run of a script under `introspect capture`."""

    side: Side
    needs: tuple[str, ...] = ()

    def make(self, target: Path, _folder: Path, forks: Forks) -> None:
        """Capture it."""
        side = self.side
        words = ["capture", "-q", *side.options, "-o", str(target), str(FIXTURES / side.script), *side.args]
        done = forks(*words, env=side.env)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(side.args)} ended with {done.returncode}: {done.stderr[-300:].strip()}")


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
    yield from _ill()


def _fits(case: Case, one: Configuration) -> bool:
    """Whether a full capture of the case can be reduced to the configuration."""
    is_real = one.capture or one.capture_a or one.capture_b or one.scripts
    return not is_real and (not case.a.options or one.a == one.b == Reduction())


def _of_case(case: Case, one: Configuration, checked: set[str]) -> Iterator[tuple[Question, dict[str, Any]]]:
    makers: dict[str, Any] = {}
    names = []
    for letter in "ab":
        side, reduction = getattr(case, letter), getattr(one, letter)
        name = name_of(side, again=letter == "b" and case.a == case.b)
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


def name_of(side: Side, *, again: bool = False) -> str:
    """The name of a capture: another one for other arguments and for another text of the script."""
    script = FIXTURES / side.script
    about = repr((side, again)).replace(str(FIXTURES), "FIXTURES") + script.read_text(encoding="utf-8")
    return f"{script.stem}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"


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


ILLNESSES = [
    "none",
    "nan-module",
    "nan-batch",
    "loss-nan",
    "overflow-ahead",
    "dead-relu",
    "saturated-tanh",
    "saturated-sigmoid",
    "vanishing",
    "exploding",
    "no-zero-grad",
    "unbalanced",
    "constant-output",
    "deaf",
    "unused-head",
    "detached",
    "forgotten",
    "batchnorm-frozen",
    "batchnorm-drift",
    "lr-zero",
    "copies",
    "tiny-updates",
    "huge-updates",
    "idle-state",
    "raw-inputs",
    "repeated-batch",
    "one-batch",
    "loss-spike",
    "loss-stuck",
]


def _ill() -> Iterator[tuple[Question, dict[str, Any]]]:
    for illness in ILLNESSES:
        steps = "60" if illness.startswith("batchnorm") else "30"
        side = Side("ill/train_ill.py", ("--illness", illness, "--steps", steps))
        yield Question(f"check ill {illness}", "check", (), (name_of(side),)), {name_of(side): Captured(side)}

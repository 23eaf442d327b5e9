"""Every planted fault under every configuration: is the place right, and is every claim of the answer true?

    python benchmarks/localization.py --matrix [--only PATTERN] [--configurations PATTERN] [--jobs N] [--keep DIRECTORY]

A cell is `right` where the first divergence is at the fault itself; `first seen` where the fault's own record is
missing and the first difference that is on record is named; `silent` where nothing that was recorded and selected
differs and nothing is claimed; and otherwise wrong, with what is false about it.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cases import FIXTURES, Captures, Case, Side
from claims import Books, false_claims, site_of
from configurations import CONFIGURATIONS, Configuration, Reduction, reduce

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.errors import IntrospectError
from introspect_cli.records import Kind
from introspect_cli.render.json import diff_document
from introspect_cli.store.read.run import open_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

PLACE = ("phase", "kind", "fqn")
OUTCOMES = ("right", "first seen", "silent", "wrong", "cannot run")


@dataclass(frozen=True)
class Cell:
    """One fault under one configuration.

    Attributes:
        outcome: one of `OUTCOMES`.
        why: what is wrong, one sentence each; or why it cannot run.
        sentence: the answer's.
    """

    outcome: str
    why: tuple[str, ...] = ()
    sentence: str = ""


def fault_cases(cases: Iterable[Case]) -> list[Case]:
    """The cases that the matrix takes: planted faults whose place is known, not yet captured in a way of their own."""
    return [case for case in cases if {"step", *PLACE} <= case.expect.keys() and not case.a.options]


def judge(case: Case, configuration: Configuration, captures: Captures) -> Cell:
    """Capture or reduce both runs, compare them, and check the answer."""
    try:
        a, b = (run_of(case, letter, configuration, captures) for letter in "ab")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Cell("cannot run", (str(error),))
    options = DiffOptions(**configuration.diff)
    with open_run(a) as one, open_run(b) as two:
        try:
            answer = diff_document(compare_runs(one, two, options))
        except IntrospectError as error:
            return Cell("silent", (), str(error))
        first = answer["first"]
        offset = first["step"] - first.get("step_b", first["step"]) if first else 0
        books = Books(
            one, two, offset, lambda step, site: options.wants_step(step) and options.wants(site.kind, site.fqn)
        )
        return _cell(case, configuration, answer, books)


def run_of(case: Case, letter: str, configuration: Configuration, captures: Captures) -> Path:
    """The run of one side of a case under a configuration, captured or reduced when it is first asked for."""
    side: Side = getattr(case, letter)
    reduction: Reduction = getattr(configuration, letter)
    extra = configuration.scripts.get(side.script, ())
    if "{checkpoint}" in extra:
        extra = tuple(word.format(checkpoint=_checkpoint(side.script, captures)) for word in extra)
    side = dataclasses.replace(
        side,
        args=(*side.args, *extra),
        options=(*configuration.capture, *getattr(configuration, f"capture_{letter}"), *side.options),
    )
    full = captures.path(side, again=letter == "b" and case.a == case.b)
    if reduction == Reduction():
        return full
    return captures.made(f"{full.name}-{configuration.name}-{letter}", lambda path: reduce(full, path, reduction))


def _checkpoint(script: str, captures: Captures) -> Path:
    def train(path: Path) -> None:
        command = [sys.executable, str(FIXTURES / script), "--steps", "2", "--save", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    return captures.made(f"{script}.checkpoint", train)


def _cell(case: Case, configuration: Configuration, answer: dict[str, Any], books: Books) -> Cell:
    tolerant = bool(configuration.diff.get("rtol"))
    problems = false_claims(answer, books, tolerant=tolerant)
    first, sentence = answer["first"], answer["sentence"]
    if problems:
        return Cell("wrong", tuple(problems), sentence)
    expect = case.expect
    same_training = not configuration.scripts
    if (
        first
        and all(first[key] == expect[key] for key in PLACE)
        and (not same_training or first["step"] == expect["step"])
    ):
        return Cell("right", (), sentence)
    if first and first["kind"] == Kind.OP_OUTPUT.value:
        return Cell("right" if first["fqn"].startswith(expect["fqn"]) else "first seen", (), sentence)
    if not tolerant and same_training and (text := _visible(expect, books, first)):
        return Cell("wrong", (f"{text}, and the answer is {answer['verdict']}",), sentence)
    if first:
        return Cell("first seen", (), sentence)
    if not tolerant and next(books.differing(), None):
        return Cell("wrong", (f"something differs, and the answer is {answer['verdict']}",), sentence)
    return Cell("silent", (), sentence)


def _visible(expect: dict[str, Any], books: Books, first: dict[str, Any] | None) -> str:
    """The expected place, where its records are there in both runs' reach and differ; "" where they do not.

    Nor where what is called first is earlier: where steps are left out, a step begins with what the fault changed.
    """
    step = expect["step"]
    if step not in books.steps or expect["kind"] not in books.observed:
        return ""
    for pair in books.pairs(step):
        site = pair.site
        if (site.phase.value, site.kind.value, site.fqn) != tuple(expect[key] for key in PLACE):
            continue
        named = first and first["step"] == step and site_of(first)
        earlier = any(other.site == named and other.order < pair.order for other in books.pairs(step))
        if books.wanted(step, site) and pair.seen and not pair.equal and not earlier:
            return f"{site.phase.value} {site.kind.value} of {site.fqn} differs at step {step}"
    return ""


def table(cells: Sequence[tuple[Configuration, Cell]]) -> str:
    """How many cells of each configuration came out how."""
    lines = [f"{'configuration':16} {'faults':>7}" + "".join(f"{name:>12}" for name in OUTCOMES)]
    for name in [*dict.fromkeys(configuration.name for configuration, _ in cells), "all"]:
        outcomes = [cell.outcome for configuration, cell in cells if name in (configuration.name, "all")]
        lines.append(f"{name:16} {len(outcomes):7}" + "".join(f"{outcomes.count(outcome):12}" for outcome in OUTCOMES))
    return "\n".join(lines)


def chosen(
    cases: Iterable[Case], configurations: Iterable[Configuration] = CONFIGURATIONS
) -> list[tuple[Case, Configuration]]:
    """The cells of the matrix, those that share captures beside each other."""
    wanted = list(configurations)
    return [(case, one) for case in fault_cases(cases) for one in wanted if one.fits(case.a.script)]


def print_matrix(cells: Sequence[tuple[Case, Configuration]], captures: Captures, jobs: int) -> int:
    """Judge the cells, print what is wrong and the table; 0 where nothing is."""
    cells_judged = []
    with ThreadPoolExecutor(jobs) as pool:
        judged = pool.map(lambda cell: judge(cell[0], cell[1], captures), cells)
        for (case, configuration), cell in zip(cells, judged, strict=True):
            cells_judged.append((configuration, cell))
            if cell.outcome in {"wrong", "cannot run"}:
                print(f"{case.name} [{configuration.name}] {cell.outcome}: {'; '.join(cell.why)}", flush=True)
                print(f"    {cell.sentence}", flush=True)
    print(table(cells_judged))
    return int(any(cell.outcome == "wrong" for _, cell in cells_judged))

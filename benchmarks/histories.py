"""Hold what `diff` says of neighbouring commits of a repository against what the commits changed.

Each commit of a range is checked out into a work tree of its own and captured once, with one seed and the same data;
each is compared with the one before it. A row says where the two runs diverge, why, and which statement `diff` names,
beside the lines that the commit itself changed: a person reads it and says whether the answer is right.

    python benchmarks/histories.py REPOSITORY RANGE -o DIRECTORY -- train.py --steps 3

`RANGE` is git's, the oldest commit first: `v1..v2`, `HEAD~10..HEAD`; `--only` chooses commits of it, each of which is
compared with the one before it. `--prove` has `bisect --changes` find the smallest set of changes of each pair that
diverges, in a second table. Words after `--` are those of `introspect capture`. Code of other people runs: use a
container. Runs are kept in the directory, so that what was captured is not captured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forks import Forks

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.rerun.changes.minimise import place_of
from introspect_cli.rerun.changes.search import prove
from introspect_cli.rerun.git import Repository, work_tree
from introspect_cli.rerun.place import Place, link
from introspect_cli.rerun.variant import Reference, Rerun, capture, log_of, logged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.changes.statements import Side

_MOST_LINES = 12
_WIDTH = 60


@dataclass(frozen=True)
class Proved:
    """What `bisect --changes` says of two commits.

    Attributes:
        places: the smallest set of changes; empty where there is none.
        changes: how many there are between the two.
        runs: how many runs were made.
        undecided: those of them that answered nothing.
        seconds: how long all of it took.
        sentence: the answer.
    """

    places: tuple[str, ...]
    changes: int
    runs: int
    undecided: int
    seconds: float
    sentence: str


@dataclass(frozen=True)
class Pair:
    """Two neighbouring commits.

    Attributes:
        commit: the later one, shortened.
        subject: its first line.
        verdict: same, diverged, undecided, or `failed` where it could not be captured.
        place: where the runs diverge: step, kind and name; "" where they do not.
        answer: the sentence; the end of the script's output where it failed.
        named: the statement that is named first, `file:line: a -> b`; "" for none.
        likely: whether it is called likely.
        changed: the lines that the commit changed, as in a diff.
        proved: which of its changes is the cause; None where that was not asked.
    """

    commit: str
    subject: str
    verdict: str
    place: str
    answer: str
    named: str
    likely: bool
    changed: tuple[str, ...]
    proved: Proved | None = None


def commits_of(repository: Repository, span: str, paths: Sequence[str] = ()) -> list[str]:
    """The commits of a range that change one of the paths, the oldest first: merges are left out."""
    first = [repository.commit(span.partition("..")[0])] if ".." in span else []
    words = ("--reverse", "--no-merges", *(() if paths else ("--first-parent",)))
    return [*first, *repository.ask("rev-list", *words, span, "--", *paths).split()]


def changed_lines(repository: Repository, one: str, two: str) -> tuple[str, ...]:
    """The lines of python, configuration and text that differ between two commits, each file's after its name."""
    lines = repository.ask("diff", "--unified=0", "--no-color", "--no-ext-diff", one, two).splitlines()
    kept = []
    for line in lines:
        if line.startswith("+++ "):
            kept.append(line.removeprefix("+++ ").removeprefix("b/"))
        elif line[:1] in {"+", "-"} and not line.startswith("--- ") and line[1:].strip():
            kept.append(f"{line[0]} {line[1:].strip()}")
    return tuple(kept)


def captured(options: argparse.Namespace, repository: Repository, commit: str) -> Rerun:
    """Capture a commit in a work tree of its own, unless its run is there."""
    run = options.output / "runs" / commit
    keep = options.keep or options.prove
    with work_tree(repository, options.output / "trees" / commit[:12], commit, keep=keep) as tree:
        place = tree.root / options.directory
        for path in options.link:
            link(Path.cwd() / path, tree.root / path)
        if options.setup:
            logged(options.setup, log_of(run).with_suffix(".setup.log"), place)
        words = ("--seed", str(options.seed), *options.words)
        return capture(run, Place(place, place), words, {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}, again=False)


def compared(repository: Repository, commits: tuple[str, str], reruns: tuple[Rerun, Rerun]) -> Pair:
    """What `diff` says of two commits, beside what the later one changed."""
    one, two = commits
    subject = repository.ask("log", "-1", "--format=%s", two)
    changed = changed_lines(repository, one, two)
    if not all(rerun.usable for rerun in reruns):
        text = next(rerun.last_lines for rerun in reruns if not rerun.usable)
        return Pair(two[:10], subject, "failed", "", text, "", False, changed)
    verdict, result = Reference(reruns[0].run).judge(reruns[1], reruns[0].exit_code)
    assert result is not None  # both are usable
    first = result.first
    place = "" if first is None else f"step {first.step}, {first.site.kind.value} {first.site.fqn}{first.site.path}"
    best = result.code.ranked[0] if result.code is not None and result.code.ranked else None
    named = "" if best is None else f"{best.change.place}: {_text(best.change.a)} -> {_text(best.change.b)}"
    likely = best is not None and best.likely
    return Pair(two[:10], subject, verdict.value, place, result.sentence, named, likely, changed)


def proved(runs: tuple[Path, Path], output: Path) -> Proved:
    """Which changes between two runs make them diverge."""
    began = time.perf_counter()
    try:
        proof = prove(*runs, (), output, None, lambda said: print("   ", said, file=sys.stderr))
    except (UsageError, StoreError) as error:
        return Proved((), 0, 0, 0, time.perf_counter() - began, str(error))
    places = tuple(dict.fromkeys(map(place_of, proof.elements))) if proof.proven else ()
    seconds = time.perf_counter() - began
    return Proved(places, proof.changes, proof.runs, proof.undecided, seconds, proof.sentence)


def _text(side: Side | None) -> str:
    return "nothing" if side is None else " ".join(side.text.split())


def table(pairs: Sequence[Pair]) -> str:
    """The pairs as a table of Markdown: what is said on the left, what the commit did on the right."""
    heads = ("commit", "place", "answer", "statement named first", "changed by the commit")
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for pair in pairs:
        lines = [_cell(line) for line in pair.changed[:_MOST_LINES]]
        more = len(pair.changed) - len(lines)
        lines += [f"and {more} more"] if more else []
        named = f"{_cell(pair.named)}{' (likely)' * pair.likely}" if pair.named else ""
        cells = (
            f"{pair.commit} {_escaped(pair.subject)}", pair.place or pair.verdict, _escaped(pair.answer), named,
            "<br>".join(lines),
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def table_of_proofs(pairs: Sequence[Pair]) -> str:
    """The smallest sets of changes as a table of Markdown."""
    rows = ["| commit | changes | smallest set | runs | seconds |", "| --- | --: | --- | --: | --: |"]
    for pair in pairs:
        if pair.proved is not None:
            one = pair.proved
            smallest = ", ".join(map(_cell, one.places)) or _escaped(one.sentence)
            cells = f"{pair.commit} {_escaped(pair.subject)}", one.changes, smallest, one.runs, f"{one.seconds:.0f}"
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _cell(text: str) -> str:
    short = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
    return f"`{short.replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def summary(pairs: Sequence[Pair]) -> str:
    """How many pairs came out how."""
    counts = {verdict: sum(pair.verdict == verdict for pair in pairs) for verdict in (*map(_value, Verdict), "failed")}
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    named = sum(pair.likely for pair in pairs if pair.verdict == Verdict.DIVERGED.value)
    return f"{len(pairs)} pairs: {verdicts}; a statement is called likely in {named} of those that diverged."


def _value(verdict: Verdict) -> str:
    return verdict.value


def histories(options: argparse.Namespace) -> list[Pair]:
    """Capture each commit once and compare neighbours."""
    repository = Repository(options.repository.resolve())
    commits = commits_of(repository, options.range, options.path)
    chosen = [at for at, commit in enumerate(commits) if commit.startswith(tuple(options.only or [""]))]
    pairs, last = [], None
    for at, commit in enumerate(commits):
        if not {at, at + 1} & {*chosen}:
            last = None
            continue
        print(f"capturing {commit[:10]}", file=sys.stderr)
        try:
            rerun = captured(options, repository, commit)
        except UsageError as error:  # a partial clone lacks files of some commits
            print(f"{commit[:10]} is left out: {error}", file=sys.stderr)
            continue
        if last is not None and at in chosen:
            pair = compared(repository, (last[0], commit), (last[1], rerun))
            if options.prove and pair.verdict == Verdict.DIVERGED.value:
                place = options.output / "proofs" / commit[:12]
                pair = replace(pair, proved=proved((last[1].run, rerun.run), place))
            pairs.append(pair)
        if last is None or rerun.usable:  # one that cannot be captured has no neighbour on either side
            last = commit, rerun
    return pairs


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 where every commit could be captured and compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("range", help="git's range of commits")
    parser.add_argument("-o", "--output", type=Path, required=True, help="where runs and work trees are kept")
    parser.add_argument("--directory", default=".", help="where in the repository the script runs")
    parser.add_argument("--link", action="append", default=[], help="a path outside of git, such as data, to link")
    parser.add_argument("--setup", default="", help="a shell command to run in each work tree before its capture")
    parser.add_argument("--path", action="append", default=[], help="take only commits that change this path")
    parser.add_argument("--only", action="append", help="the start of a commit that is compared; may be repeated")
    parser.add_argument("--prove", action="store_true", help="find the smallest set of changes that makes each diverge")
    parser.add_argument("--warm", action="store_true", help="fork captures from a process that has torch imported")
    parser.add_argument("--keep", action="store_true", help="keep the work trees, as `bisect --changes` needs them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the pairs there, too")
    parser.add_argument("words", nargs="+", help="capture options, the script and its arguments, after --")
    options = parser.parse_args(argv)
    options.output = options.output.resolve()
    forks = Forks() if options.warm else None
    if forks is not None:
        sys.executable = str(forks.stand_in())
    try:
        pairs = histories(options)
    except (UsageError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if forks is not None:
            forks.close()
    print(table(pairs), summary(pairs), *([table_of_proofs(pairs)] if options.prove else []), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1), encoding="utf-8")
    return int(any(pair.verdict in {"failed", Verdict.UNDECIDED.value} for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())

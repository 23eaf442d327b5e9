"""What the verbs decide of every planted fault, asked again and compared with what they decided before.

    python benchmarks/decisions.py make DIRECTORY [--only GLOB] [--slice N] [--jobs N]
    python benchmarks/decisions.py ask DIRECTORY -o NOW.jsonl [--only GLOB] [--slice N] [--jobs N] [--claims]
    python benchmarks/decisions.py compare NOW.jsonl [--frozen FILE] [--accepted FILE] [--should-be FILE]

Whoever rebuilds the inside of the comparison may word an answer anew, and may not decide otherwise. `make` captures the
runs, once for each state of the code that records; `ask` asks `diff` and `check` of them in this process, without
torch, and writes a row of data for each question; `compare` sorts what differs from the frozen set into verdict, place,
role, cause, statement, setting and finding. A difference is a mistake, or stands with its reason in `accepted.yaml`
beside the set, in `fixtures/decisions/`. Where the frozen answer is known to be false, `should_be.yaml` says what it
should be. With `--claims` each claim of an answer is derived again from the two runs (`claims.py`).

`make` and `ask` leave out what is there already, so that `ask --slice 40` after `make --slice 40` takes seconds. To ask
the code of another working tree, put it first on the path: `PYTHONPATH=TREE python decisions.py ask ...`.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from kept_runs import recorder_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from forks import Forks

TREE = Path(__file__).resolve().parent.parent
KEPT = TREE / "fixtures" / "decisions"

SURROUNDINGS = {"COLUMNS": "120", "LINES": "50", "NO_COLOR": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8", "TERM": "dumb"}
"""Of the environment, what an answer may depend on."""

RECORDED_IN = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}
"""The environment of the runs, whoever makes them: what of it differs is a setting."""

CATEGORIES = {
    "verdict": ("exit", "verdict", "training", "evaluation"),
    "place": ("step", "rank", "phase", "kind", "fqn", "call", "path"),
    "role": ("role", "origins", "parts"),
    "cause": ("reason", "found"),
    "statement": ("statements",),
    "setting": ("settings",),
    "finding": ("findings",),
    "claim": ("claims",),
}
"""The columns of a row, by what a difference in them is counted as."""

LATER = frozenset({"found"})
"""Columns that most frozen rows have not: they are compared where a row or `should_be.yaml` has them."""


OTHER_NAMES = frozenset(
    {"ranks", "faults", "splits", "precision", "refactorings", "ports", "checkpoints", "resumed", "scenes"}
)
"""Questions about runs in which a value has two names, parts, calls or numbers of a step: no claim is derived again."""


@dataclass(frozen=True)
class Question:
    """A verb, its options and the runs that it is asked of, by the names that `planned` gives them."""

    name: str
    verb: str
    options: tuple[str, ...]
    runs: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------- rows


def row_of(document: dict[str, Any]) -> dict[str, Any]:
    """What the JSON document of `diff` or `check` decides; columns that say nothing are left out."""
    if "checked" in document:
        keys = ("rule", "level", "step", "site", "rank")
        return {"findings": sorted([finding.get(key) for key in keys] for finding in document["findings"])}
    first = document.get("first") or {}
    row = {name: first.get(name) for name in (*CATEGORIES["place"], "role", "reason")} if first else {}
    others = [origin.get("divergence") or {} for origin in document.get("origins") or ()]
    parts = (document.get("resumed") or {}).get("parts") or ()
    code = document.get("code") or {}
    row |= {
        "verdict": document.get("verdict"),
        "training": _separate(document.get("training"), document),
        "evaluation": _separate(document.get("evaluation"), document),
        "origins": sorted({_place(other) for other in others if other} - {_place(first)}),
        "parts": sorted(f"{part['part']}: {part['state']}" for part in parts),
        "statements": [change["place"] for change in code.get("changes") or () if change.get("likely")],
        "found": [_found(finding) for finding in document.get("findings") or ()],
        "settings": [_setting(change) for change in document.get("settings") or () if _explains(change)],
    }
    return {name: value for name, value in row.items() if value not in (None, [], "")}


def _found(finding: dict[str, Any]) -> list[Any]:
    """The code of a finding, and what each run has."""
    fields = finding.get("fields") or {}
    return [finding.get("code"), fields.get("a"), fields.get("b")]


def _place(site: dict[str, Any]) -> str:
    return " ".join(str(site.get(name)) for name in CATEGORIES["place"])


def _separate(answer: dict[str, Any] | None, whole: dict[str, Any]) -> str | None:
    """The answer for training or evaluation alone; None where it is that of the whole."""
    if answer is None or (answer["verdict"], answer["first"]) == (whole["verdict"], whole["first"]):
        return None
    return f"{answer['verdict']} {_place(answer['first'] or {}) if answer['first'] else ''}".strip()


def _explains(change: dict[str, Any]) -> bool:
    """Whether a setting is said to explain it; the commit says when the runs were made."""
    return bool(change.get("explains")) and change["source"] != "git"


def _setting(change: dict[str, Any]) -> list[Any]:
    """Source, name and both values; of a file its name alone, as its checksums change with any edit of a fixture."""
    values = [] if change["source"] == "sources" else [change["a"], change["b"]]
    return [change["source"], change["name"], *values]


# -------------------------------------------------------------------------------------------------------- asking


def asked(question: Question, folder: Path, *, claims: bool = False) -> dict[str, Any]:
    """The row of a question, asked through the command line within this process; with the claims that are false."""
    from introspect_cli import cli

    words = [question.verb, "--format", "json", *question.options, *(str(folder / name) for name in question.runs)]
    before = sys.argv, sys.stdout, sys.stderr
    out = io.StringIO()
    sys.argv, sys.stdout, sys.stderr = ["introspect", *words], out, io.StringIO()
    code: object = 0
    try:
        with warnings.catch_warnings(record=True):
            cli.main()
    except SystemExit as ending:
        code = ending.code
    except Exception as error:  # a row says that there was one
        code = type(error).__name__
    finally:
        sys.argv, sys.stdout, sys.stderr = before
    text = out.getvalue().replace(str(folder), "RUNS").replace(f"{TREE}/", "")
    document = json.loads(text) if text.startswith("{") else {}
    row = {"exit": code, **(row_of(document) if document else {})}
    if claims and document and question.verb == "diff" and question.name.split()[1] not in OTHER_NAMES:
        row["claims"] = claimed(document, question, *(folder / name for name in question.runs))
    return row


def claimed(document: dict[str, Any], question: Question, a: Path, b: Path) -> list[str]:
    """What of an answer the two runs do not bear out."""
    from claims import Books, false_claims

    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.records import Kind
    from introspect_cli.schedule.rules import Schedule
    from introspect_cli.store.run import open_run

    told = dict(itertools.pairwise(question.options))
    chosen = {
        "steps": Schedule.parse(told.get("--steps", ":")),
        "kinds": frozenset(map(Kind, told["--kinds"].split(","))) if "--kinds" in told else None,
        "modules": (told["--modules"],) if "--modules" in told else (),
    }
    options = DiffOptions(**{name: value for name, value in chosen.items() if value})
    with open_run(a) as one, open_run(b) as two:
        first = document.get("first") or {}
        several = len(one.ranks) > 1 or len(two.ranks) > 1 or bool(document.get("structure"))
        books = Books(
            one,
            two,
            first.get("step", 0) - first.get("step_b", first.get("step", 0)),
            lambda step, site: options.wants_step(step) and options.wants(site.kind, site.fqn),
        )
        tolerant = several or "--rtol" in told or first.get("reason") == "split" or "resumed" in document
        return false_claims(document, books, tolerant=tolerant)


def _start(questions: Sequence[tuple[Question, Path]], claims: bool) -> None:
    import gc

    os.environ.update(SURROUNDINGS)
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        os.environ.pop(name, None)
    time.tzset()
    globals()["_asking"] = questions, claims
    gc.freeze()


def _ask(number: int) -> tuple[int, dict[str, Any]]:
    questions, claims = globals()["_asking"]
    return number, asked(*questions[number], claims=claims)


def ask(directory: Path, output: Path, questions: Sequence[Question], jobs: int, key: str, *, claims: bool) -> int:
    """Ask the questions whose runs are there, and write their rows.

    A question is asked of runs that the code at hand recorded; where it made none, of those of another state of it.
    """
    import introspect_cli.cli

    own = directory / (key or recorder_key())
    others = sorted(directory.iterdir(), key=lambda path: -sum(1 for _ in path.iterdir()))
    folders = [own, *(other for other in others if other != own and not key)]
    there = []
    for question in questions:
        found = next((folder for folder in folders if has_runs(folder, question.runs)), None)
        if found is not None:
            there.append((question, found))
    started = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(jobs, _start, (there, claims)) as pool:
        rows = dict(pool.imap_unordered(_ask, range(len(there)), chunksize=8))
    write_rows(output, {there[number][0].name: rows[number] for number in sorted(rows)})
    print(f"{len(there)} questions asked of {introspect_cli.__path__[0]} in {time.perf_counter() - started:.0f} s:")
    foreign = sum(folder != own for _, folder in there)
    print(f"{foreign} of runs that another state of the code recorded; {len(questions) - len(there)} have no runs")
    return int(not there)


def has_runs(folder: Path, runs: Iterable[str]) -> bool:
    """Whether all of these runs were made in a folder to their end."""
    return all((folder / f"{run.partition('/')[0]}.done").exists() for run in runs)


def write_rows(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write rows, a line for each decision with the questions that it was made of."""
    questions: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        questions[json.dumps(row, ensure_ascii=False)].append(name)
    lines = (f"{json.dumps(names)[:-1]}, {row}]\n" for row, names in questions.items())
    with gzip.GzipFile(path, "w", mtime=0) if path.suffix == ".gz" else path.open("wb") as file:
        file.writelines(line.encode() for line in lines)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by question; files are named without their folders, which depend on whether the tree is a repository."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return {name: row for *names, row in map(json.loads, map(_without_folders, file)) for name in names}


def _without_folders(text: str) -> str:
    return re.sub(r"(?:[\w.-]+/)+(?=[\w-]+\.py\b)", "", text)


# --------------------------------------------------------------------------------------------------------- making


def planned(only: Sequence[str] = (), every: int = 1) -> tuple[list[Question], dict[str, Any]]:
    """The questions that are asked for, and how each run that they need is made, in an order in which it can be."""
    from corpora import corpora

    questions: list[Question] = []
    runs: dict[str, Any] = {}
    everything: dict[str, Any] = {}
    chosen = re.compile("|".join(map(translate, only)))
    for question, makers in corpora():
        everything.update(makers)
        if (not only or chosen.match(question.name)) and zlib.crc32(question.name.encode()) % every == 0:
            questions.append(question)
    for question in questions:
        for name in question.runs:
            for needed in _needed(name, everything):
                runs[needed] = everything[needed]
    return questions, runs


def _needed(name: str, makers: dict[str, Any]) -> Iterator[str]:
    name = name.partition("/")[0]
    for other in makers[name].needs:
        yield from _needed(other, makers)
    yield name


_IMPORTED = """
import torch.distributed.tensor.parallel, torch.distributed.pipelining, torch.distributed.fsdp, torch.distributed.optim
"""


def make(directory: Path, runs: dict[str, Any], jobs: int, forks: Forks) -> int:
    """Make the runs that are not there, one process after the other."""
    folder = directory / recorder_key()
    folder.mkdir(parents=True, exist_ok=True)
    failed = []

    def made(name: str) -> None:
        if (folder / f"{name}.done").exists():
            return
        try:
            with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as place:
                runs[name].make(Path(place) / name, folder, forks)
                shutil.rmtree(folder / name, ignore_errors=True)
                (Path(place) / name).rename(folder / name)
            (folder / f"{name}.done").touch()
        except Exception as error:  # all that fail are listed
            failed.append(f"{name}: {error!r}"[:300])

    with (folder / "making").open("w") as lock, ThreadPoolExecutor(jobs) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        list(pool.map(made, [name for name, run in runs.items() if not run.needs]))
        list(pool.map(made, [name for name, run in runs.items() if run.needs]))
    print(f"{len(runs) - len(failed)} runs are in {folder}")
    print("\n".join(failed))
    return int(bool(failed))


# ------------------------------------------------------------------------------------------------------- comparing


def compare(now: Path, frozen: Path, accepted: Path, should_be: Path, shown: int) -> int:
    """Print what differs from the frozen set; 1 where anything does that nobody accepted."""
    old, new = read_rows(frozen), read_rows(now)
    rules, right = (
        yaml.safe_load(_without_folders(path.read_text(encoding="utf-8"))) for path in (accepted, should_be)
    )
    counts: Counter[tuple[str, str]] = Counter()
    listed: dict[tuple[str, str], list[str]] = defaultdict(list)
    wrong, not_frozen = set(), 0
    for name in new:
        corrected = [entry["row"] for entry in right if _among(name, entry["questions"])]
        was = old.get(name)
        if was is None and not corrected:
            not_frozen += 1
            continue
        for category, column, state, text in differences(name, new[name], was, corrected, rules):
            counts[category, state] += 1
            if state in {MISTAKE, FALSE}:
                listed[state, category].append(f"{column} of {name}{text}")
            if state == MISTAKE:
                wrong.add(name)
    for state in (FALSE, MISTAKE):
        for category in CATEGORIES:
            for text in listed[state, category][:shown]:
                print(f"{state}: {category}: {text}")
    unasked = len(old.keys() - new.keys())
    print(f"\n{len(new) - not_frozen} rows compared, {not_frozen} not frozen, {unasked} not asked")
    for (category, state), count in sorted(counts.items()):
        print(f"{count:6} {category:10} {state}")
    print(f"{len(wrong)} rows have differences that nobody accepted")
    return int(bool(wrong) or len(new) == not_frozen)


MISTAKE, FALSE, RIGHT = "MISTAKE", "known to be false", "set right"


def _among(name: str, globs: str) -> bool:
    return _any(name, globs.split(" | "))


def _any(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def differences(
    name: str, now: dict[str, Any], was: dict[str, Any] | None, corrected: Sequence[dict[str, Any]], rules: Any
) -> Iterator[tuple[str, str, str, str]]:
    """What of a row differs: its category, its column, whether that is a mistake, and what was and is.

    Args:
        name: the question.
        now: the row.
        was: the frozen row; None where none is.
        corrected: columns that are known to be false in it, as they should be.
        rules: what was accepted.
    """
    should: dict[str, Any] = {**(was or {})}
    for entry in corrected:
        should |= entry
    for category, columns in CATEGORIES.items():
        for column in columns:
            if column in LATER and column not in should:
                continue
            is_now, before, wanted = (_plain(row.get(column), rules) for row in (now, was or {}, should))
            if is_now == wanted:
                if before != wanted and was is not None:
                    yield category, column, RIGHT, ""
            elif was is None or (wanted != before and is_now == before):
                yield category, column, FALSE, f"\n    is        {is_now}\n    should be {wanted}"
            else:
                reason = _accepted(rules["accepted"], name, column, before, is_now)
                told = f"\n    was {before}\n    is  {is_now}"
                yield category, column, f"accepted: {reason}" if reason else MISTAKE, told


def _plain(value: Any, rules: Any) -> Any:
    """A value as it is compared: merged classes as one, no rules and settings that are gone."""
    if isinstance(value, str):
        return rules["merged"].get(value, value)
    if isinstance(value, list) and value and isinstance(value[0], list):
        gone = rules["settings_gone"]
        kept = [one for one in value if one[0] not in rules["rules_gone"] and not _any(str(one[1]), gone)]
        return [*kept[:1], *sorted(kept[1:], key=json.dumps)] or None
    return value or None


def _accepted(rules: Iterable[dict[str, Any]], name: str, column: str, was: Any, now: Any) -> str:
    """Why a difference is none; "" where nobody said so. A rule may ask for texts in what was and in what is."""
    for rule in rules:
        columns = rule["what"] if isinstance(rule["what"], list) else [rule["what"]]
        names = [column for what in columns for column in CATEGORIES.get(what, (what,))]
        has = all(str(rule.get(key, "")) in json.dumps(value) for key, value in (("was", was), ("is", now)))
        if column in names and has and _among(name, rule["questions"]):
            return str(rule["why"])
    return ""


def main() -> int:
    """Do what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["make", "ask", "compare"])
    parser.add_argument("place", type=Path, help="the directory of the runs; compare: the rows")
    parser.add_argument("-o", "--output", type=Path, default=Path("decisions.jsonl"))
    parser.add_argument("--only", action="append", default=[], help="a glob of questions; may be repeated")
    parser.add_argument("--slice", type=int, default=1, metavar="N", help="one question of N")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", default="", metavar="KEY", help="ask of the runs of this state of the code")
    parser.add_argument("--claims", action="store_true", help="hold each claim of diff against the two runs, too")
    parser.add_argument("--frozen", type=Path, default=KEPT / "frozen.jsonl.gz")
    parser.add_argument("--accepted", type=Path, default=KEPT / "accepted.yaml")
    parser.add_argument("--should-be", type=Path, default=KEPT / "should_be.yaml")
    parser.add_argument("--shown", type=int, default=10, help="differences that are printed of each sort")
    told = parser.parse_args()
    if told.verb == "compare":
        return compare(told.place, told.frozen, told.accepted, told.should_be, told.shown)
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    questions, runs = planned(told.only, told.slice)
    place = told.place.resolve()
    if told.verb == "make":
        folder = place / recorder_key()
        if all((folder / f"{name}.done").exists() for name in runs):
            print(f"{len(runs)} runs are in {folder}")
            return 0
        from forks import Forks

        os.environ.update(RECORDED_IN)
        forks = Forks(_IMPORTED if any(getattr(run, "world", 1) > 1 for run in runs.values()) else "")
        try:
            return make(place, runs, told.jobs, forks)
        finally:
            forks.close()
    return ask(place, told.output, questions, told.jobs, told.runs, claims=told.claims)


if __name__ == "__main__":
    sys.exit(main())

"""What the verbs decide of every planted fault, asked again and compared with what they decided before.

    python benchmarks/decisions.py make DIRECTORY [--only GLOB] [--slice N] [--jobs N]
    python benchmarks/decisions.py ask DIRECTORY -o NOW.jsonl [--only GLOB] [--slice N] [--jobs N] [--runs KEY]
    python benchmarks/decisions.py compare NOW.jsonl [--frozen FILE] [--accepted FILE] [--should-be FILE]

Whoever rebuilds the inside of the comparison may word an answer anew, and may not decide otherwise. `make` captures the
runs, once for each state of the code that records; `ask` asks `diff` and `check` of them in this process, without
torch, and writes a row of data for each question; `compare` sorts what differs from the frozen set into verdict, place,
role, cause, statement, setting and finding. A difference is a mistake, or stands with its reason in `accepted.yaml`
beside the set, in `fixtures/decisions/`. Where the frozen answer is known to be false, `should_be.yaml` says what it
should be.

`make` and `ask` leave out what is there already, so that `ask --slice 40` after `make --slice 40` takes seconds. To ask
the code of another working tree, put it first on the path: `PYTHONPATH=TREE python decisions.py ask ...`.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

TREE = Path(__file__).resolve().parent.parent
KEPT = TREE / "fixtures" / "decisions"

SURROUNDINGS = {"COLUMNS": "120", "LINES": "50", "NO_COLOR": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8", "TERM": "dumb"}
"""Of the environment, what an answer may depend on."""

CATEGORIES = {
    "verdict": ("exit", "verdict", "training", "evaluation"),
    "place": ("step", "rank", "phase", "kind", "fqn", "call", "path"),
    "role": ("role", "origins", "parts"),
    "cause": ("reason",),
    "statement": ("statements",),
    "setting": ("settings",),
    "finding": ("findings",),
}
"""The columns of a row, by what a difference in them is counted as."""


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
    if "verdict" not in document:
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
        "settings": [_setting(change) for change in document.get("settings") or () if _explains(change)],
    }
    return {name: value for name, value in row.items() if value not in (None, [], "")}


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


def asked(question: Question, folder: Path) -> dict[str, Any]:
    """The row of a question, asked through the command line within this process."""
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
    row = row_of(json.loads(text)) if text.startswith("{") else {}
    return {"exit": code, **row}


def _start(folder: Path, questions: Sequence[Question]) -> None:
    import gc

    os.environ.update(SURROUNDINGS)
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        os.environ.pop(name, None)
    time.tzset()
    globals()["_asking"] = folder, questions
    gc.freeze()


def _ask(number: int) -> tuple[int, dict[str, Any]]:
    folder, questions = globals()["_asking"]
    return number, asked(questions[number], folder)


def ask(directory: Path, output: Path, questions: Sequence[Question], jobs: int, key: str) -> int:
    """Ask the questions whose runs are there, and write their rows."""
    folder = directory / (key or key_of_code())
    if not folder.is_dir():
        others = [path for path in directory.iterdir() if path.is_dir()]
        folder = max(others, key=lambda path: sum(1 for _ in path.iterdir()))
        print(f"no runs of the code that records here (make them); asking of those of {folder.name}", file=sys.stderr)
    import introspect_cli.cli

    there = [question for question in questions if all((folder / f"{run}.done").exists() for run in question.runs)]
    started = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(jobs, _start, (folder, there)) as pool:
        rows = dict(pool.imap_unordered(_ask, range(len(there)), chunksize=8))
    write_rows(output, {there[number].name: rows[number] for number in sorted(rows)})
    took = time.perf_counter() - started
    code = introspect_cli.__path__[0]
    print(f"{len(there)} questions asked of {code} in {took:.0f} s, {len(questions) - len(there)} without runs")
    return int(not there)


def write_rows(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Write rows, a line for each decision with the questions that it was made of."""
    questions: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        questions[json.dumps(row, ensure_ascii=False)].append(name)
    lines = (f"{json.dumps(names)[:-1]}, {row}]\n" for row, names in questions.items())
    with gzip.GzipFile(path, "w", mtime=0) if path.suffix == ".gz" else path.open("wb") as file:
        file.writelines(line.encode() for line in lines)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by question."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return {name: row for *names, row in map(json.loads, file) for name in names}


# --------------------------------------------------------------------------------------------------------- making


RECORDING = ("capture", "tensors", "script", "schedule", "store/write", "store/format", "records.py", "statistics.py")
"""The part of the package on which it depends what a run holds."""


def key_of_code() -> str:
    """A checksum of the code that records."""
    import importlib.util

    spec = importlib.util.find_spec("introspect_cli")
    assert spec is not None
    package = Path(next(iter(spec.submodule_search_locations or ())))
    check = 0
    for name in RECORDING:
        place = package / name
        files = [place] if place.is_file() else [path for path in place.rglob("*") if path.suffix in _CODE]
        for path in sorted(files):
            check = zlib.crc32(str(path.relative_to(package)).encode() + path.read_bytes(), check)
    return f"{check:08x}"


_CODE = frozenset({".py", ".cpp", ".h"})


def planned(only: str = "", every: int = 1) -> tuple[list[Question], dict[str, Any]]:
    """The questions that are asked for, and how each run that they need is made, in an order in which it can be."""
    from corpora import corpora

    questions: list[Question] = []
    runs: dict[str, Any] = {}
    everything: dict[str, Any] = {}
    for question, makers in corpora():
        everything.update(makers)
        named = not only or fnmatchcase(question.name, only)
        if named and zlib.crc32(question.name.encode()) % every == 0:
            questions.append(question)
    for question in questions:
        for name in question.runs:
            for needed in _needed(name, everything):
                runs[needed] = everything[needed]
    return questions, runs


def _needed(name: str, makers: dict[str, Any]) -> Iterator[str]:
    for other in makers[name].needs:
        yield from _needed(other, makers)
    yield name


def make(directory: Path, runs: dict[str, Any], jobs: int) -> int:
    """Make the runs that are not there; several processes may do so at once."""
    from forks import Forks

    folder = directory / key_of_code()
    folder.mkdir(parents=True, exist_ok=True)
    forks = Forks()
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

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(made, [name for name, run in runs.items() if not run.needs]))
        list(pool.map(made, [name for name, run in runs.items() if run.needs]))
    forks.close()
    print(f"{len(runs) - len(failed)} runs are in {folder}")
    print("\n".join(failed))
    return int(bool(failed))


# ------------------------------------------------------------------------------------------------------- comparing


def compare(now: Path, frozen: Path, accepted: Path, should_be: Path, shown: int) -> int:
    """Print what differs from the frozen set; 1 where anything does that nobody accepted."""
    old, new = read_rows(frozen), read_rows(now)
    rules = yaml.safe_load(accepted.read_text(encoding="utf-8")) or {}
    merged = rules.get("merged") or {}
    right = yaml.safe_load(should_be.read_text(encoding="utf-8")) or []
    compared = [name for name in new if name in old]
    counts: Counter[tuple[str, str]] = Counter()
    differences: list[tuple[str, str, str]] = []
    for name in compared:
        wanted = dict(old[name])
        for entry in right:
            if fnmatchcase(name, entry["question"]):
                wanted |= entry["row"]
        for category, columns in CATEGORIES.items():
            for column in columns:
                is_now, was, should = (_plain(row.get(column), merged) for row in (new[name], old[name], wanted))
                if is_now == should:
                    counts[category, "set right"] += was != should
                elif is_now == was:
                    counts[category, "known to be false"] += 1
                elif reason := _accepted(rules.get("accepted") or [], name, column, was, is_now):
                    counts[category, f"accepted: {reason}"] += 1
                else:
                    counts[category, "MISTAKE"] += 1
                    differences.append((category, column, f"{name}\n    was {was}\n    is  {is_now}"))
    for category in CATEGORIES:
        for kind, column, text in [one for one in differences if one[0] == category][:shown]:
            print(f"{kind}: {column} of {text}")
    print(
        f"\n{len(compared)} rows compared, {len(new) - len(compared)} not frozen, {len(old) - len(compared)} not asked"
    )
    for (category, state), count in sorted(counts.items()):
        if count:
            print(f"{count:6} {category:10} {state}")
    rows = {text.partition("\n")[0] for *_, text in differences}
    print(f"{len(rows)} rows have differences that nobody accepted")
    return int(bool(rows) or not compared)


def _plain(value: Any, merged: dict[str, str]) -> Any:
    """A value as it is compared: classes by what they were merged into; of the settings but the first, the set."""
    if isinstance(value, str):
        return merged.get(value, value)
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [value[0], *sorted(value[1:], key=json.dumps)]
    return value or None


def _accepted(rules: Iterable[dict[str, Any]], name: str, column: str, was: Any, now: Any) -> str:
    """Why a difference is none; "" where nobody said so. A rule may ask for texts in what was and in what is."""
    for rule in rules:
        columns = rule["what"] if isinstance(rule["what"], list) else [rule["what"]]
        names = [column for what in columns for column in CATEGORIES.get(what, (what,))]
        has = all(str(rule.get(key, "")) in json.dumps(value) for key, value in (("was", was), ("is", now)))
        if column in names and has and fnmatchcase(name, rule["question"]):
            return str(rule["why"])
    return ""


def main() -> int:
    """Do what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["make", "ask", "compare"])
    parser.add_argument("place", type=Path, help="the directory of the runs; compare: the rows")
    parser.add_argument("-o", "--output", type=Path, default=Path("decisions.jsonl"))
    parser.add_argument("--only", default="", help="a glob of questions")
    parser.add_argument("--slice", type=int, default=1, metavar="N", help="one question of N")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", default="", metavar="KEY", help="ask of the runs of this state of the code")
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
        return make(place, runs, told.jobs)
    return ask(place, told.output, questions, told.jobs, told.runs)


if __name__ == "__main__":
    sys.exit(main())
